"""Checks that no child process outlives a block."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_process_left() -> Iterator[None]:
    """Fail if a child process that started in the block still runs after it; those of other tests do not count."""
    before = {*multiprocessing.active_children()}
    yield
    assert {*multiprocessing.active_children()} <= before
