"""Lowered to localized: fewer, larger and earlier collectives, less memory, and one rank's shapes."""
