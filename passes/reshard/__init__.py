"""Annotated to lowered: what each op needs, the reshards between ops, and the collectives of each reshard."""
