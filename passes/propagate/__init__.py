"""Canonical to annotated: a sharding on every value, from the few that the user annotated."""
