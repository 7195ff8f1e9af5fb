"""Conformance: runs programs of others sharded and compares results. ``python -m tests.conformance SUITE``."""
