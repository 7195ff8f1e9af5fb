"""Values that are unknown during capture: a model's own line may check them, print them, or log them.

A check is ``assert`` or ``if ...: raise``. It is passed over, as ``torch._assert`` is: no step runs it. A check whose
error the model catches is a branch.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

Place = tuple[int, int, int, int]  # first line and column, last line and column


class UnknownValueError(Exception):
    """A number that is unknown during capture is used, and not just checked or printed."""


class UnknownNumber:
    """The result of ``item()`` during capture: it may be formatted, printed and stored, but no tensor made of it.

    A number that is computed from it is unknown, too. ``pass_over`` is called with the frame of a check that compares
    it. In a ``%`` format it is ``nan``, or 0 if the format takes only whole numbers.
    """

    def __init__(self, pass_over: Callable[[FrameType], None]) -> None:
        self._pass_over = pass_over

    def __repr__(self) -> str:
        return "(unknown during capture)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __round__(self, digits: int = 0) -> UnknownNumber:
        return self

    def __float__(self) -> float:
        return math.nan if _is_formatting(sys._getframe(1)) else self._used()

    def __int__(self) -> int:
        return 0 if _is_formatting(sys._getframe(1)) else self._used()

    def _compared(self, other: Any) -> bool:
        frame = sys._getframe(1)
        passing = passing_check(frame)
        if passing is None:
            raise UnknownValueError
        self._pass_over(frame)
        return passing

    def _computed(self, *others: Any) -> UnknownNumber:
        return self if all(isinstance(other, (int, float, UnknownNumber)) for other in others) else self._used()

    def _used(self, *others: Any) -> NoReturn:
        raise UnknownValueError

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _computed
    __bool__ = __complex__ = __index__ = __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = _used
    __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _used
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __iter__ = __len__ = __contains__ = __hash__ = _used


def _is_formatting(frame: FrameType) -> bool:
    """Whether a frame formats a text with ``%``. Between two numbers ``%`` does not convert its operands."""
    at = (each for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti)
    return any(each.opname == "BINARY_OP" and each.argrepr in ("%", "%=") for each in at)


def passing_check(frame: FrameType) -> bool | None:
    """The truth value that lets a check pass, if a frame is currently testing a condition of it; else None.

    The condition is the check's whole test, or a part of it under ``not``, ``and`` and ``or`` alone.
    """
    place = _place(frame)
    if place is None:
        return None
    checks = _statements(frame.f_code.co_filename).checks
    check = next((check for check in checks if _holds(_span(check.test), place)), None)
    return None if check is None or _is_caught(frame, check.error) else _passing(check.test, check.value, place)


def _place(frame: FrameType) -> Place | None:
    """The place of the expression that a frame evaluates; at a jump, which tests a value, the place of the value."""
    at = frame.f_lasti // 2
    if "JUMP" in (name := dis.opname[frame.f_code.co_code[frame.f_lasti]]) or name == "TO_BOOL":
        at -= 1
    line, last_line, column, last_column = next(itertools.islice(frame.f_code.co_positions(), at, None), (None,) * 4)
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


class _Check(NamedTuple):
    """A check: its test, the value at which it passes, and the error that it raises; None for a bare ``raise``."""

    test: ast.expr
    value: bool
    error: ast.expr | None


class _Catch(NamedTuple):
    """Lines whose errors are caught, and the classes of those errors; None for all classes."""

    first: int
    last: int
    classes: ast.expr | None


class _Statements(NamedTuple):
    """The checks in a file, and its statements that catch errors and raise none."""

    checks: tuple[_Check, ...] = ()
    catches: tuple[_Catch, ...] = ()


@functools.lru_cache(maxsize=256)
def _statements(filename: str) -> _Statements:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return _Statements()
    nodes = list(ast.walk(tree))
    return _Statements(tuple(_checks_in(nodes)), tuple(_catches_in(nodes)))


def _checks_in(nodes: list[ast.AST]) -> Iterator[_Check]:
    for node in nodes:
        if isinstance(node, ast.Assert):
            yield _Check(node.test, True, ast.Name("AssertionError"))
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse:
            error = node.body[0].exc
            yield _Check(node.test, False, error.func if isinstance(error, ast.Call) else error)


def _catches_in(nodes: list[ast.AST]) -> Iterator[_Catch]:
    for node in nodes:
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                if not isinstance(handler.body[-1], ast.Raise):
                    yield _Catch(node.body[0].lineno, node.body[-1].end_lineno or 0, handler.type)
        elif isinstance(node, ast.With):
            for call in (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)):
                if ast.unparse(call.func).endswith("suppress"):
                    classes = ast.Tuple(call.args, ast.Load())
                    yield _Catch(node.body[0].lineno, node.body[-1].end_lineno or 0, classes)


_TORCH = f"site-packages{os.sep}torch{os.sep}"
_CAPTURE = str(Path(__file__).parents[1] / "capture.py"), "run"  # the function that calls the model


def _is_caught(frame: FrameType | None, error: ast.expr | None) -> bool:
    """Whether the model catches an error of a line, in that line's own function or in one that calls it."""
    raised = _classes(frame, error) if frame is not None and error is not None else ()
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _CAPTURE:
        file = frame.f_code.co_filename
        for first, last, classes in () if _TORCH in file else _statements(file).catches:
            if first <= frame.f_lineno <= last and (classes is None or _overlap(raised, _classes(frame, classes))):
                return True
        frame = frame.f_back
    return False


def _classes(frame: FrameType, node: ast.expr) -> tuple[type, ...]:
    """The classes that an expression of a frame names; empty if they are not known."""
    if isinstance(node, ast.Tuple):
        return tuple(found for element in node.elts for found in _classes(frame, element))
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return ()
    try:
        value = eval(ast.unparse(node), frame.f_globals, frame.f_locals)
    except Exception:  # of a name that is not there, or of a property
        return ()
    return (value,) if isinstance(value, type) else (type(value),) if isinstance(value, BaseException) else ()


def _overlap(raised: tuple[type, ...], caught: tuple[type, ...]) -> bool:
    """Whether an error that is raised may be one that is caught; unknown classes may be any."""
    return not raised or not caught or any(issubclass(one, caught) for one in raised)


def _passing(test: ast.expr, value: bool, place: Place) -> bool | None:
    """The value of the part at ``place`` with which the whole test has ``value``; None if it is no such part."""
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
