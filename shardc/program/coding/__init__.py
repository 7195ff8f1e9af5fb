"""Collectives that send codes in place of values."""
