"""What a model does with the values of tensors while it is captured, when there are none."""
