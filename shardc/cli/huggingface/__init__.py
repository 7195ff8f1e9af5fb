"""Models of transformers by their type: the default config, random weights and made-up inputs."""
