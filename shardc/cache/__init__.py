"""What passes have made of programs, in a folder: one process runs them, and the next one reads."""
