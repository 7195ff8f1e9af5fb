"""How a command ends: its exit codes, and the error of a command line that cannot be followed."""

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70


class UsageError(ValueError):
    """A command line that cannot be followed."""
