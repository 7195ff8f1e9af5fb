"""Finding a plan: mesh, annotations and options for a model and a number of devices."""
