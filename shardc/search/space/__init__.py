"""The space of plans: the dims that may be cut, meshes, and a plan as a user writes it."""
