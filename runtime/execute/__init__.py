"""Execution: a program's calls as instructions, and the executors that run them."""
