"""Last phase: fewer, joined and earlier collectives, what is recomputed, and local shapes."""
