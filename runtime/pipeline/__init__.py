"""Running the stages of a pipeline."""
