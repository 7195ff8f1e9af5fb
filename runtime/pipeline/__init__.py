"""Runs the stages of a pipeline."""
