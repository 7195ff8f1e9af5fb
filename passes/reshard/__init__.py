"""Annotated to lowered: the cuts of each op, the reshards between ops, and the collectives of each reshard."""
