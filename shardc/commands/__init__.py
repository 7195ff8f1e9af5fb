"""The commands, one file each: what it reads (``add``) and what it does (``run``, an exit code)."""
