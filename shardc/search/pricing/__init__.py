"""What plans cost: by a few blocks of the model, and of the whole model."""
