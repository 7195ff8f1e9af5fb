"""Checkpoints: what a job has trained, on disk, in files that any other mesh or a single process reads."""
