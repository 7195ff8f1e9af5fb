"""Execution: the parts of a program as graphs of kernels, and the Python that fx generates from them."""
