"""Numbers that go by the mesh too: how many windows a cut dim has, how long these are together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from shardc.symbol_form import Factors, Form, Point, Term

POWERS = (0, 1, -1, 2)


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
        for powers in product(POWERS, repeat=len(self.base)):
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
