"""Ops over a cut dim as local work and small reductions or exchanges of edges."""
