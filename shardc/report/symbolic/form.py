"""Forms: numbers as functions of named sizes, found from their values at a few points.

A form is a sum of ``coefficient * product of (symbol + shift) ** power`` and a whole number. The dims of tensors are
such sums.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from shardc.language.mesh import Axes, AxisPart, Mesh
from shardc.language.sharding import DimSharding, Sharding, TensorType
from shardc.ops.pointwise import is_pointwise
from shardc.program.program import Program

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
        """The value, cut to a whole number if the sizes of a point do not divide as they must."""
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
        """A product of axes times the terms, or times terms and offset; or times a part of a number without terms."""
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
        """The form plus a multiple of each axis: the slope from the base to a point where only this axis differs."""
        slopes: dict[str, Fraction] = {}
        for point, value in zip(self.points, values, strict=True):
            moved = [name for name, size in self.base.items() if point[name] != size]
            if len(moved) == 1 and moved[0] not in slopes:
                slopes[moved[0]] = (value - form.exact(point)) / (point[moved[0]] - self.base[moved[0]])
        terms = tuple(Term(slopes[name], ((name, 0, 1),)) for name in self.base if slopes.get(name))
        offset = form.offset - sum((slope * self.base[name] for name, slope in slopes.items()), start=Fraction(0))
        if terms and offset.denominator == 1:
            yield Form((*form.terms, *terms), int(offset))


Number = Any  # an int; a sympy.Expr where sizes have names
NumberKey = tuple[str, ...]  # a node's module, phase, op, and index among such nodes; the number's index in it


def numbers(program: Program) -> list[tuple[NumberKey, int]]:
    """Every number of arguments, types and shardings, in order, each with its key."""
    pairs: list[tuple[NumberKey, int]] = []

    def visit(key: NumberKey, number: int) -> int:
        pairs.append((key, number))
        return number

    assert program.mesh is not None
    _Rewrite(program, program.mesh, visit).run()
    return pairs


def with_numbers(program: Program, mesh: Mesh, new: Sequence[Number]) -> Program:
    """The same program with other numbers, in the order of ``numbers``, on a mesh of the same axes."""
    rest = iter(new)
    result = _Rewrite(program, mesh, lambda key, number: next(rest)).run()
    assert next(rest, None) is None, "more numbers than the program has"
    return result


class _Rewrite:
    """Copies a program and replaces each number by ``visit(key, number)``."""

    def __init__(self, program: Program, mesh: Mesh, visit: Callable[[NumberKey, int], Number]) -> None:
        assert program.mesh is not None
        self.program, self.mesh, self.visit, self.old_mesh = program.copy(), mesh, visit, program.mesh
        self.key: NumberKey = ()
        self.slot = 0

    def run(self) -> Program:
        program = self.program
        inputs, computed, pins = [], {}, []
        for put in program.inputs:
            self._start("input", put.kind, put.name)
            inputs.append(replace(put, type=self._type(put.type)))
        for name, sharding in program.computed.items():
            self._start("computed", name)
            computed[name] = self._sharding(sharding)
        for pin in program.pins:
            self._start("pin", pin.kind, pin.name)
            pins.append(replace(pin, sharding=self._sharding(pin.sharding)))
        for key, node in self._keyed():
            self._start(*key)
            self._rewrite(node)
        return replace(program, mesh=self.mesh, inputs=tuple(inputs), computed=computed, pins=tuple(pins))

    def _start(self, *key: str) -> None:
        self.key, self.slot = key, 0

    def _new(self, number: int) -> Number:
        self.slot += 1
        return self.visit((*self.key, str(self.slot)), number)

    def _keyed(self) -> Iterator[tuple[NumberKey, fx.Node]]:
        """Each node with its key: its module, phase and op, and its index among the nodes with these."""
        program, count = self.program, dict[NumberKey, int]()
        inputs = {node: (put.kind, put.name) for put, node in zip(program.inputs, program.placeholders, strict=True)}
        for node in program.graph.nodes:
            source = program.source(node)
            key = inputs.get(node) or (source.module, source.phase, _op_name(node.target))
            count[key] = count.get(key, -1) + 1
            yield (*key, str(count[key])), node

    def _rewrite(self, node: fx.Node) -> None:
        program = self.program
        types, shardings, has_many = program.types(node), program.shardings(node), program.has_many(node)
        if not is_pointwise(node.target):  # numbers in the arguments of pointwise ops are not sizes
            node.args = map_aggregate(node.args, self._leaf)
            node.kwargs = map_aggregate(node.kwargs, self._leaf)
        if node.op == "output":
            return
        new_types = tuple(None if each is None else self._type(each) for each in types)
        program.set_type(node, new_types if has_many else new_types[0])
        if shardings:
            new_shardings = tuple(None if each is None else self._sharding(each) for each in shardings)
            program.set_sharding(node, new_shardings if has_many else new_shardings[0])
        program.forget_rule(node)

    def _leaf(self, leaf: Any) -> Any:
        return self._new(leaf) if type(leaf) is int else leaf

    def _type(self, type_: TensorType) -> TensorType:
        return TensorType(tuple(map(self._new, type_.shape)), type_.dtype)

    def _sharding(self, sharding: Sharding) -> Sharding:
        dims = tuple(
            DimSharding(self._axes(dim.axes), tuple((self._new(size), self._axes(axes)) for size, axes in dim.minor))
            for dim in sharding.dims
        )
        return Sharding(self.mesh, dims, tuple((self._part(part), op) for part, op in sharding.partial))

    def _axes(self, axes: Axes) -> Axes:
        return tuple(map(self._part, axes))

    def _part(self, part: AxisPart) -> AxisPart:
        """A whole axis stays the whole axis of the new mesh; the sizes of a part are numbers."""
        if self.old_mesh.is_whole(part):
            return self.mesh.axis(part.name)
        return AxisPart(part.name, self._new(part.pre), self._new(part.size))


def outline(program: Program) -> list[str]:
    """The program without its numbers, a line for each node: programs with equal outlines have the same plan.

    Values are renumbered in the order of the program, since their own numbers have gaps where passes dropped values.
    """
    counts, names = Counter[str](), dict[str, str]()
    for node in program.graph.nodes:
        name = re.sub(r"_\d+$", "", node.name)
        names[node.name] = f"{name}_{counts[name]}" if counts[name] else name
        counts[name] += 1
    return [_line(program, node, names) for node in program.graph.nodes]


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first lines of two outlines that differ, in words; empty if they are equal."""
    pairs = zip([*ours, ""], [*theirs, ""], strict=False)
    mine, other = next(((mine, other) for mine, other in pairs if mine != other), ("", ""))
    if mine == other:
        return ""
    return f"{mine.partition(' [')[0] or 'the end'} is {other.partition(' [')[0] or 'the end'} there"


def _line(program: Program, node: fx.Node, names: Mapping[str, str]) -> str:
    def blank(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return names[leaf.name]
        return "#" if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else str(leaf)

    source, args = program.source(node), map_aggregate((node.args, dict(node.kwargs)), blank)
    types = [None if each is None else (len(each.shape), str(each.dtype)) for each in program.types(node)]
    cuts = [each and _cuts(each) for each in program.shardings(node)]
    place = (
        f"{source.module} (stage {source.stage})" if program.options.pipeline and source.stage >= 0 else source.module
    )
    return f"{source.phase} {place or '(model)'}: {names[node.name]} {types} {cuts} = {_op_name(node.target)} {args}"


def _op_name(target: Any) -> str:
    """The name of an op, the same in every process."""
    return str(target) if isinstance(target, str) or hasattr(target, "_schema") else str(target.__name__)


def _cuts(sharding: Sharding) -> tuple[Any, ...]:
    def names(axes: Axes) -> str:
        return "+".join(part.name if sharding.mesh.is_whole(part) else f"{part.name}:()" for part in axes)

    dims = [(names(dim.axes), *(names(axes) for _, axes in dim.minor)) for dim in sharding.dims]
    return (*dims, *((names((part,)), op) for part, op in sharding.partial))
