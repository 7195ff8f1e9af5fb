"""Looks for garbage while shardc works: not among what has lived long; all of torch takes a quarter of a compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Without looks at the oldest objects, which come again at the end."""
    thresholds = gc.get_threshold()
    if thresholds[2] == NEVER:  # another's, who puts it back
        yield
        return
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
