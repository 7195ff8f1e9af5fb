"""How a command ends: its exit codes, and the error of a command line that cannot be followed."""

from shardc.error import ShardingError

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70


class UsageError(ShardingError):
    """A command line that cannot be followed: ``who`` is the argument, ``remedy`` what to type instead."""
