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


AXIS_POWERS = (0, 1, -1, 2)


@dataclass(frozen=True)
class Widening:
    """From forms on the mesh ``base`` to forms on all meshes, by values at ``points`` where axes have other sizes."""

    base: Mapping[str, int]
    points: Sequence[Point]

    def widen(self, form: Form, values: Sequence[int]) -> Form | None:
        """The form with these values at the points that is ``form`` on the mesh; none where none is found."""
        return next((found for found in self._candidates(form, values) if self._holds(found, values)), None)

    def _holds(self, form: Form, values: Sequence[int]) -> bool:
        return all(form.exact(point) == value for point, value in zip(self.points, values, strict=True))

    def _candidates(self, form: Form, values: Sequence[int]) -> Iterator[Form]:
        yield form
        for powers in product(AXIS_POWERS, repeat=len(self.base)):
            factors = tuple((name, 0, power) for name, power in zip(self.base, powers, strict=True) if power)
            if factors:
                yield from self._scaled(form, factors, values[0])
        yield from self._sloped(form, values)

    def _scaled(self, form: Form, factors: Factors, first: int) -> Iterator[Form]:
        """All that depends on sizes times a product of axes, or all of it; of a fixed number a part."""
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
        """With a multiple of each axis more."""
        slopes = {name: self._slope(form, name, values) for name in self.base}
        terms = tuple(Term(slope, ((name, 0, 1),)) for name, slope in slopes.items() if slope)
        offset = form.offset - sum((slope * self.base[name] for name, slope in slopes.items()), start=Fraction(0))
        if terms and offset.denominator == 1:
            yield Form((*form.terms, *terms), int(offset))

    def _slope(self, form: Form, name: str, values: Sequence[int]) -> Fraction:
        """By how much the number grows with an axis, from a point where no other axis has another size."""
        for point, value in zip(self.points, values, strict=True):
            if [other for other, size in self.base.items() if point[other] != size] == [name]:
                return Fraction(value - form.exact(point)) / (point[name] - self.base[name])
        return Fraction(0)
