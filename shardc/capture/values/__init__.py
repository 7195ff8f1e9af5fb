"""Uses of the values of tensors in a model, which are unknown while it is captured."""
