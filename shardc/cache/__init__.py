"""The cache: compiled programs in a folder. One process runs the passes, and the next one reads the result."""
