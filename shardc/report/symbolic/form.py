"""Forms: numbers as functions of named sizes, found from their values at a few points.

A form is a sum of ``coefficient * product of (symbol + shift) ** power`` and a whole number. The dims of tensors are
such sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

Point = Mapping[str, int]  # a size for each symbol
Factors = tuple[tuple[str, int, int], ...]  # a symbol, shift and power each

POWERS = (0, 1, 2, -1)
AXIS_POWERS = (0, 1, -1, 2)
SHIFTS = (1, -1, 2, -2)  # a next token, a class token, both ends


@dataclass(frozen=True, slots=True)
class Term:
    """A product of powers and a coefficient."""

    coefficient: Fraction
    factors: Factors

    def exact(self, point: Point) -> Fraction:
        """The value at a point."""
        bases = (Fraction(point[name] + shift) ** power for name, shift, power in self.factors)
        return math.prod(bases, start=self.coefficient)

    def expression(self, symbols: Mapping[str, Any]) -> Any:
        """The term as a sympy expression in symbols."""
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
        """The form as a sympy expression in symbols; an int if it has no terms."""
        return sum((term.expression(symbols) for term in self.terms), start=self.offset)


def point_text(point: Point) -> str:
    """``dp=2, B=8``."""
    return ", ".join(f"{name}={size}" for name, size in point.items())


def _first_fitting(forms: Iterable[Form], points: Sequence[Point], values: Sequence[int]) -> Form | None:
    """The first form with these values at the points."""
    pairs = list(zip(points, values, strict=True))
    return next((form for form in forms if all(form.exact(point) == value for point, value in pairs)), None)


@dataclass(frozen=True)
class Fitter:
    """Finds forms from values at the same points; of those that fit, the first in order of simplicity."""

    points: Sequence[Point]

    def fit(self, values: Sequence[int]) -> Form | None:
        """The form of a number with these values at the points, or None."""
        if len(set(values)) == 1:
            return Form(offset=values[0])
        return _first_fitting(self._candidates(values), self.points, values)

    def _candidates(self, values: Sequence[int]) -> Iterator[Form]:
        unshifted = dict.fromkeys(self.points[0], 0)
        yield from self._products(values, unshifted)
        for name in unshifted:
            yield from self._lines(values, name)
        for name, shift in product(unshifted, SHIFTS):
            yield from self._products(values, {**unshifted, name: shift})
        for shift in SHIFTS:
            for form in self._products([value - shift for value in values], unshifted):
                yield Form(form.terms, shift)

    def _products(self, values: Sequence[int], shifts: Mapping[str, int]) -> Iterator[Form]:
        """Monomials whose ratio from the first point to the second is that of the values."""
        low, high = self.points[:2]
        if not values[0]:
            return
        shifted = {name: (low[name] + shift, high[name] + shift) for name, shift in shifts.items()}
        ratios = {name: Fraction(end, start) for name, (start, end) in shifted.items() if start}
        for powers in product(POWERS, repeat=len(ratios)):
            power_of = dict(zip(ratios, powers, strict=True))
            ratio = math.prod((ratios[name] ** power for name, power in power_of.items()), start=Fraction(1))
            if ratio == Fraction(values[1], values[0]):
                factors = tuple((name, shifts[name], power) for name, power in power_of.items() if power)
                yield Form((Term(values[0] / Term(Fraction(1), factors).exact(low), factors),))

    def _lines(self, values: Sequence[int], name: str) -> Iterator[Form]:
        """A multiple of one symbol and a constant."""
        low, high = (point[name] for point in self.points[:2])
        if high != low:
            slope = Fraction(values[1] - values[0], high - low)
            offset = values[0] - slope * low
            if slope and offset.denominator == 1:
                yield Form((Term(slope, ((name, 0, 1),)),), int(offset))


@dataclass(frozen=True)
class Widening:
    """Extends forms on the mesh ``base`` to all meshes, by values at ``points`` where axes have other sizes."""

    base: Mapping[str, int]
    points: Sequence[Point]

    def widen(self, form: Form, values: Sequence[int]) -> Form | None:
        """The form that equals ``form`` on the base mesh and has these values at the points; None if there is none."""
        return _first_fitting(self._candidates(form, values), self.points, values)

    def _candidates(self, form: Form, values: Sequence[int]) -> Iterator[Form]:
        yield form
        for powers in product(AXIS_POWERS, repeat=len(self.base)):
            factors = tuple((name, 0, power) for name, power in zip(self.base, powers, strict=True) if power)
            if factors:
                yield from self._scaled(form, factors, values[0])
        yield from self._sloped(form, values)

    def _scaled(self, form: Form, factors: Factors, first: int) -> Iterator[Form]:
        """A product of axes times the terms, or times the terms and the offset; of a fixed number times a part."""
        unit = math.prod((Fraction(self.base[name]) ** -power for name, _, power in factors), start=Fraction(1))
        scaled = tuple(Term(each.coefficient * unit, each.factors + factors) for each in form.terms)
        if scaled:
            yield Form(scaled, form.offset)
        if form.offset:
            yield Form((*scaled, Term(form.offset * unit, factors)))
        times = Term(unit, factors).exact(self.points[0])
        if not scaled and times != 1:
            fixed = (first - form.offset * times) / (1 - times)
            if fixed.denominator == 1 and fixed != form.offset:
                yield Form((Term((form.offset - fixed) * unit, factors),), int(fixed))

    def _sloped(self, form: Form, values: Sequence[int]) -> Iterator[Form]:
        """The form and a multiple of each axis: the slope from the base to a point where only this axis is another."""
        slopes: dict[str, Fraction] = {}
        for point, value in zip(self.points, values, strict=True):
            moved = [name for name, size in self.base.items() if point[name] != size]
            if len(moved) == 1 and moved[0] not in slopes:
                slopes[moved[0]] = (value - form.exact(point)) / (point[moved[0]] - self.base[moved[0]])
        terms = tuple(Term(slopes[name], ((name, 0, 1),)) for name in self.base if slopes.get(name))
        offset = form.offset - sum((slope * self.base[name] for name, slope in slopes.items()), start=Fraction(0))
        if terms and offset.denominator == 1:
            yield Form((*form.terms, *terms), int(offset))
