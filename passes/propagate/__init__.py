"""Second phase: a sharding on every value."""
