"""Garbage collection in processes that compile all day: not over torch, and rarely over all that lives."""

from __future__ import annotations

import gc


def exempt_imports() -> None:
    """Exempt every object that lives now, the imports' above all, from collection, and collect the others rarely.

    A collection over all of torch takes a quarter of a compilation; over everything else, a tenth of all test time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
