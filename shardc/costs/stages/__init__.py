"""The stages of a pipeline: the cuts between them, their costs and messages, and their schedule."""
