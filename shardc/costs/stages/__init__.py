"""The stages of a pipeline: where to cut, what each runs and sends, and when."""
