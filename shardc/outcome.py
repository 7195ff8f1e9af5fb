"""How a command ends: its exit codes, and the error of a command line that cannot be followed."""

from shardc.error import OptionError

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70
INTERRUPTED = 130  # as shells have it: 128, and the number of the signal


class UsageError(OptionError):
    """A command line that cannot be followed: ``who`` is the argument, ``remedy`` what to type instead."""
