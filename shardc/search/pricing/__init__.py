"""Costs of plans: estimated from a few blocks of the model, and computed for the whole model."""
