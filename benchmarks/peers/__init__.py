"""The peers: the same models trained by torch's own tools, or parallelized by hand."""
