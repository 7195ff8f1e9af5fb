"""A program whose sizes are sympy expressions in the symbols, and which of its dims are cut evenly."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.mesh import MICROBATCH, Mesh
from shardc.program import Program
from shardc.sharding import Sharding, TensorType, num_shards
from shardc.symbol_form import Form, Point
from shardc.symbol_numbers import numbers, with_numbers

if TYPE_CHECKING:
    import sympy


def named(names: Iterable[str]) -> dict[str, sympy.Symbol]:
    """A positive whole number by each name."""
    import sympy

    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


def value(expression: Any, point: Point) -> Any:
    """An expression's value where its symbols are numbers: exact, an int where it is whole."""
    import sympy

    found = sympy.sympify(expression).subs({each: point[each.name] for each in _symbols(expression)})
    return int(found) if found.is_integer else found


def _symbols(expression: Any) -> list[Any]:
    return sorted(getattr(expression, "free_symbols", ()), key=str)


@dataclass(frozen=True, slots=True)
class Cut:
    """A size of a dim, cut in ``shards`` pieces: expressions. ``is_even``: the pieces are equal in this plan."""

    size: Any
    shards: Any
    is_even: bool

    def holds(self, point: Point) -> bool:
        """Whether the pieces are there as even or uneven as here."""
        return (value(self.size, point) % value(self.shards, point) == 0) == self.is_even

    def lacks(self, point: Point) -> int:
        """How many times as large the size would have to be to be cut evenly."""
        import sympy

        return int(sympy.Rational(value(self.size, point), value(self.shards, point)).q)

    def text(self) -> str:
        """As one says it."""
        import sympy

        whole, parts = sympy.fraction(sympy.together(sympy.sympify(self.size) / self.shards))
        return f"{whole} is {'' if self.is_even else 'no '}multiple of {parts}".replace("is m", "is a m")


@dataclass(frozen=True)
class Symbolic:
    """A lowered program in which every number is a form of the symbols, some of which are ``axes`` of the mesh."""

    reference: Program
    forms: Sequence[Form]
    point: Point
    axes: Sequence[str]

    @property
    def held(self) -> set[str]:
        """The axes that cannot have another size: the stages of a pipeline lie along it."""
        pipeline = self.reference.options.pipeline
        return {pipeline.axis} if pipeline else set()

    def at(self, point: Point) -> Program:
        """The lowered program at other sizes."""
        return with_numbers(self.reference, self._mesh(point), [form.at(point) for form in self.forms])

    def says(self, point: Point, program: Program) -> bool:
        """Whether a program of this plan has the numbers that the forms have at a point."""
        return [form.exact(point) for form in self.forms] == [size for _, size in numbers(program)]

    @functools.cached_property
    def expressed(self) -> tuple[Program, tuple[Cut, ...]]:
        """The program with expressions for its numbers and local types, and how its dims are cut."""
        symbols = named(self.point)
        express = functools.cache(lambda form: form.expression(symbols))
        made = with_numbers(self.reference, self._mesh(symbols), list(map(express, self.forms)))
        cuts = tuple(dict.fromkeys(self._cuts(made)))
        return _localized(made, _pieces(cuts)), cuts

    def evened(self, expression: Any) -> Any:
        """An expression in which pieces that are equal in the plan are not rounded up."""
        import sympy

        return sympy.sympify(expression).xreplace(_pieces(self.expressed[1]))

    def _mesh(self, sizes: Mapping[str, Any]) -> Mesh:
        """The program's mesh with other sizes, which may be symbols; of a pipeline that of one stage."""
        old, mesh = self.reference.mesh, Mesh.__new__(Mesh)
        assert old is not None
        fixed = {MICROBATCH, old.stage_axis}
        mesh.axis_names, mesh.device_ids, mesh.stage_axis = old.axis_names, None, old.stage_axis
        pairs = zip(old.axis_names, old.shape, strict=True)
        mesh.shape = tuple(size if name in fixed else sizes[name] for name, size in pairs)
        return mesh

    def _cuts(self, program: Program) -> Iterator[Cut]:
        """Of all values, and of parameters as they are computed on; of what is not cut, that it is whole."""
        is_even = functools.cache(lambda size, shards: value(size, self.point) % value(shards, self.point) == 0)
        stored = {name: program.types(node)[0] for (_, name), node in program.named_inputs.items()}
        pairs: list[tuple[TensorType | None, Sharding | None]] = [
            (stored[name], sharding) for name, sharding in program.computed.items()
        ]
        for node in program.graph.nodes:
            if node.op != "output":
                pairs += zip(program.types(node), program.shardings(node), strict=False)
        for type_, sharding in dict.fromkeys(pairs):
            for dim, size in zip(sharding.dims if sharding else (), type_.shape if type_ else (), strict=True):
                for sub, axes in dim.subdims(size):
                    if axes or not getattr(sub, "is_integer", True):
                        shards = num_shards(axes)
                        yield Cut(sub, shards, is_even(sub, shards))

    def wholes(self) -> Iterator[Cut]:
        """That every number is a whole one: half of a size is one of even sizes alone."""
        import sympy

        symbols = named(self.point)
        for form in dict.fromkeys(self.forms):
            size, parts = sympy.fraction(sympy.together(form.expression(symbols)))
            if parts != 1:
                yield Cut(size, parts, is_even=True)


def mesh_at(axes: Sequence[str], point: Point) -> Mesh:
    """The mesh of these axes at a point."""
    return Mesh(device_ids=None, **{name: point[name] for name in axes})


def _pieces(cuts: Iterable[Cut]) -> dict[Any, Any]:
    """For how a size is rounded that is cut evenly, what it is."""
    import sympy

    parts = [-sympy.sympify(cut.size) / cut.shards for cut in cuts if cut.is_even]
    return {sympy.floor(part): part for part in parts}


def _localized(program: Program, pieces: Mapping[Any, Any]) -> Program:
    """Local types, in which even cuts need not be rounded up."""
    import sympy

    local: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def local_type(type_: TensorType | None, sharding: Sharding | None) -> TensorType | None:
        if type_ is None or sharding is None:
            return type_
        key = type_.shape, sharding
        if key not in local:
            shape = sharding.local_shape(type_.shape)
            local[key] = tuple(
                sympy.sympify(size).xreplace(pieces) if not isinstance(size, int) else size for size in shape
            )
        return TensorType(local[key], type_.dtype)

    program = program.copy(level="localized")
    for node in program.graph.nodes:
        if node.op != "output" and program.shardings(node):
            types = tuple(map(local_type, program.types(node), program.shardings(node)))
            program.set_local_types(node, types)
    return program
