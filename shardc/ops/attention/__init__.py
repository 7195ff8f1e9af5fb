"""Fused attention, and attention whose positions are cut: block of keys by block of keys, in a ring over ranks."""
