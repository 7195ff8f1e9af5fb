"""Checkpoints: the state of training, in files that any other mesh or a single process can read."""
