"""Bytes as an expression and as the number that it is at a point, by which they are compared: ledgers run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """``value`` at a point; ``terms``: how often each expression is in the sum. Order is that of values."""

    value: int
    terms: Mapping[Any, int]

    @property
    def expression(self) -> Any:
        """The sum."""
        return sum(expression * times for expression, times in self.terms.items())

    def __add__(self, other: Size | int) -> Size:
        terms = dict(self.terms)
        for expression, times in _terms(other).items():
            terms[expression] = terms.get(expression, 0) + times
            if not terms[expression]:
                del terms[expression]
        return Size(self.value + _value(other), terms)

    __radd__ = __add__

    def __sub__(self, other: Size | int) -> Size:
        return self + other * -1

    def __rsub__(self, other: int) -> Size:
        return self * -1 + other

    def __mul__(self, times: int) -> Size:
        return Size(self.value * times, {expression: n * times for expression, n in self.terms.items()})

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return bool(self.value == _value(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __lt__(self, other: Size | int) -> bool:
        return bool(self.value < _value(other))

    def __le__(self, other: Size | int) -> bool:
        return bool(self.value <= _value(other))

    def __gt__(self, other: Size | int) -> bool:
        return bool(self.value > _value(other))

    def __ge__(self, other: Size | int) -> bool:
        return bool(self.value >= _value(other))


def expression_of(size: Any) -> Any:
    """Of a size; a number is its own."""
    return size.expression if isinstance(size, Size) else size


def _value(size: Any) -> Any:
    return size.value if isinstance(size, Size) else size


def _terms(size: Size | int) -> Mapping[Any, int]:
    return size.terms if isinstance(size, Size) else {1: size} if size else {}
