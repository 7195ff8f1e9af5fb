"""Garbage collection in processes that compile all day: imports are exempt, and full collections are rare."""

from __future__ import annotations

import gc


def exempt_imports() -> None:
    """Exempt all current objects, mainly those of imports, from garbage collection, and collect others rarely.

    Collections over torch take a quarter of a compilation; those over all else take a tenth of the test time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
