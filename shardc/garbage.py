"""Looks for garbage while shardc works: at what it makes, not at all of torch, which takes a quarter of a compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def new_garbage_only() -> Iterator[None]:
    """What is there now is looked at again at the end; where the caller has frozen objects, nothing is done."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
