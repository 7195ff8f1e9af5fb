"""Compiled models in a folder: what one process has compiled the next one reads."""
