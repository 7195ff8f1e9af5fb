"""Explanations: why a sharding or a collective is there, its alternatives, and changes that remove it."""
