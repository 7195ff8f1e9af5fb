"""The command line, one file a command. The exit codes are here."""

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70
INTERRUPTED = 130  # as in shells: 128 plus the number of the signal
