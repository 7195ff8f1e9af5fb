"""Annotated to annotated: ops that need a cut dim whole become local work and small reductions."""
