"""Conformance: what others' programs compute, computed sharded. ``python -m tests.conformance SUITE`` prints counts."""
