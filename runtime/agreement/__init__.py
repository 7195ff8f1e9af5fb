"""What the ranks of a job must have equal, compared over a process group of its own."""
