"""A number as a function of named sizes: found from its values at a few points, and exact or none.

A form is a sum of ``coefficient * product of (symbol + shift) ** power`` and an offset: what dims of tensors are made
of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

Point = Mapping[str, int]  # a size for each symbol

POWERS = (0, 1, 2, -1)
SHIFTS = (1, -1, 2, -2)  # a next token, a class token, both ends


Factors = tuple[tuple[str, int, int], ...]  # a symbol, shift and power each


@dataclass(frozen=True, slots=True)
class Term:
    """A product."""

    coefficient: Fraction
    factors: Factors

    def exact(self, point: Point) -> Fraction:
        """The value at a point."""
        bases = (Fraction(point[name] + shift) ** power for name, shift, power in self.factors)
        return math.prod(bases, start=self.coefficient)

    def expression(self, symbols: Mapping[str, Any]) -> Any:
        """As an expression in symbols."""
        bases = ((symbols[name] + shift) ** power for name, shift, power in self.factors)
        return math.prod(bases, start=self.coefficient.numerator) / self.coefficient.denominator


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of terms and a whole number."""

    terms: tuple[Term, ...] = ()
    offset: int = 0

    def exact(self, point: Point) -> Fraction:
        """The value at a point."""
        return sum((term.exact(point) for term in self.terms), start=Fraction(self.offset))

    def at(self, point: Point) -> int:
        """The value, cut to a whole number where the sizes of a point do not divide as they must."""
        return int(self.exact(point))

    def expression(self, symbols: Mapping[str, Any]) -> Any:
        """As an expression in symbols; an int where it has none."""
        return sum((term.expression(symbols) for term in self.terms), start=self.offset)


def constant(value: int) -> Form:
    """What does not depend on sizes."""
    return Form(offset=value)


def product_form(coefficient: Fraction, factors: Factors, offset: int = 0) -> Form:
    """One product and a whole number."""
    return Form((Term(coefficient, factors),), offset)


@dataclass(frozen=True)
class Fitter:
    """Finds forms from values at the same points; of those that fit it takes the first that is simplest."""

    points: Sequence[Point]

    def fit(self, values: Sequence[int]) -> Form | None:
        """The form of a number with these values at the points, or none."""
        if len(set(values)) == 1:
            return constant(values[0])
        return next((form for form in self._candidates(values) if self._holds(form, values)), None)

    def _holds(self, form: Form, values: Sequence[int]) -> bool:
        return all(form.exact(point) == value for point, value in zip(self.points, values, strict=True))

    def _candidates(self, values: Sequence[int]) -> Iterator[Form]:
        symbols = list(self.points[0])
        yield from self._products(values, dict.fromkeys(symbols, 0))
        for name in symbols:
            yield from self._lines(values, name)
        for name, shift in product(symbols, SHIFTS):
            yield from self._products(values, {other: shift if other == name else 0 for other in symbols})
        for shift in SHIFTS:
            for form in self._products([value - shift for value in values], dict.fromkeys(symbols, 0)):
                yield Form(form.terms, shift)

    def _products(self, values: Sequence[int], shifts: Mapping[str, int]) -> Iterator[Form]:
        """Monomials, by what they are multiplied with from the first point to the second."""
        first, second = values[:2]
        if not first:
            return
        steps = {
            name: Fraction(self.points[1][name] + shift, self.points[0][name] + shift)
            for name, shift in shifts.items()
            if self.points[0][name] + shift
        }
        grown = Fraction(second, first)
        for powers in product(POWERS, repeat=len(steps)):
            if (
                math.prod((step**power for step, power in zip(steps.values(), powers, strict=True)), start=Fraction(1))
                == grown
            ):
                factors = tuple((name, shifts[name], power) for name, power in zip(steps, powers, strict=True) if power)
                unit = Term(Fraction(1), factors).exact(self.points[0])
                yield product_form(first / unit, factors)

    def _lines(self, values: Sequence[int], name: str) -> Iterator[Form]:
        """A multiple of one symbol and a constant."""
        low, high = (point[name] for point in self.points[:2])
        if high != low:
            slope = Fraction(values[1] - values[0], high - low)
            rest = values[0] - slope * low
            if slope and rest.denominator == 1:
                yield product_form(slope, ((name, 0, 1),), int(rest))
