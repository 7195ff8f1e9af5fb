"""TARGET: a model and its inputs, from a function or from transformers by type, with made-up inputs."""
