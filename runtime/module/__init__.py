"""The parallel module: the user's interface to parameters, gradients and optimizer steps."""
