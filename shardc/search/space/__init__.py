"""The space of plans: what may be cut, on which meshes, and a plan as a user writes it."""
