"""Agreement: the ranks of a job compare everything that must be equal, over a process group of its own."""
