"""Support for parallel modules in Accelerate and in the Trainer of transformers."""
