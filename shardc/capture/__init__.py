"""From a model and example inputs to a program: tracing, decompositions, annotations, initial values."""
