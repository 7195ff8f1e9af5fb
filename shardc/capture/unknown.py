"""What a model's own line may do with a value that is unknown during capture: check it, print it, log it.

A check is ``assert`` or ``if ...: raise``. It is passed over, as ``torch._assert`` is: a step does not run it.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

Place = tuple[int, int, int, int]  # first line and column, last line and column


class UnknownValueError(Exception):
    """A number that is unknown during capture is used for something else than to be checked or printed."""


class Unknown:
    """What ``item()`` returns during capture: it may be formatted, printed and stored, but not computed with.

    ``pass_over`` is called with the frame of a check that compares it.
    """

    def __init__(self, pass_over: Callable[[FrameType], None]) -> None:
        self._pass_over = pass_over

    def __repr__(self) -> str:
        return "(unknown during capture)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __round__(self, digits: int = 0) -> Unknown:
        return self

    def _compared(self, other: Any) -> bool:
        frame = sys._getframe(1)
        passing = passing_check(frame)
        if passing is None:
            raise UnknownValueError
        self._pass_over(frame)
        return passing

    def _used(self, *others: Any) -> NoReturn:
        raise UnknownValueError

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __trunc__ = __floor__ = __ceil__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _used
    __neg__ = __pos__ = __abs__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _used
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __iter__ = __len__ = __contains__ = __hash__ = _used


def passing_check(frame: FrameType) -> bool | None:
    """The truth value that lets a check pass, if a frame is just testing a condition of that check; else None.

    The condition is the check's whole test, or a part of it under ``not``, ``and`` and ``or`` alone.
    """
    place = _place(frame)
    if place is None:
        return None
    checks = _checks(frame.f_code.co_filename)
    return next((_passing(test, value, place) for test, value in checks if _holds(_span(test), place)), None)


def _place(frame: FrameType) -> Place | None:
    """Where the expression stands that a frame evaluates; of a jump, which tests a value, that of the value."""
    at = frame.f_lasti // 2
    if "JUMP" in (name := dis.opname[frame.f_code.co_code[frame.f_lasti]]) or name == "TO_BOOL":
        at -= 1
    line, last_line, column, last_column = next(itertools.islice(frame.f_code.co_positions(), at, None), (None,) * 4)
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


@functools.lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The tests of all checks of a file, each with the value at which the check passes."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    found: list[tuple[ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse:
            found.append((node.test, False))
    return tuple(found)


def _passing(test: ast.expr, value: bool, place: Place) -> bool | None:
    """The value that the part of a test at ``place`` has where the whole is ``value``; None for another part."""
    is_whole = _span(test) == place
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _passing(test.operand, not value, _span(test.operand) if is_whole else place)
    if is_whole:
        return value
    parts = test.values if isinstance(test, ast.BoolOp) else []
    return next((_passing(part, value, place) for part in parts if _holds(_span(part), place)), None)


def _span(node: ast.expr) -> Place:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _holds(outer: Place, inner: Place) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]
