"""Annotated to annotated: ops whose whole dim arrives cut become local work and small reductions."""
