"""Blocks of a model that are alike, which are traced once."""
