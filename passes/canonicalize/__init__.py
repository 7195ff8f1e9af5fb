"""Captured to canonical: few kinds of op, each with a rule; contractions keep the model's dims."""
