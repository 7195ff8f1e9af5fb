"""``stage_boundary`` inside a model: a new pipeline stage begins here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PASSED: ContextVar[list[int]] = ContextVar("passed")  # one number: how many marks the traced model has passed


def stage_boundary() -> None:
    """Say inside a model that a new pipeline stage begins here: with what comes next. Nothing outside shardc."""
    if passed := _PASSED.get(None):
        passed[0] += 1


def marks_passed() -> int:
    """How many marks the model that is captured has passed."""
    passed = _PASSED.get(None)
    return passed[0] if passed else 0


@contextmanager
def counting_marks() -> Iterator[None]:
    """In the block marks are counted from 0."""
    token = _PASSED.set([0])
    try:
        yield
    finally:
        _PASSED.reset(token)
