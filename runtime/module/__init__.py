"""The parallel module: parameters, gradients and optimizer steps at the border to the user."""
