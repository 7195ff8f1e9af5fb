"""What lets Accelerate and the Trainer of transformers take a parallel module."""
