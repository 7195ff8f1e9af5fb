"""TARGET: a model and its inputs, from a function or from transformers: default config, random weights, made-up inputs."""
