"""A lowered program whose sizes are sympy expressions in the symbols, and which of its dims are cut evenly."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import Sharding, TensorType, num_shards
from shardc.program.program import Program
from shardc.report.symbolic.condition import CutCondition, symbols_of, value
from shardc.report.symbolic.form import Form, Point
from shardc.report.symbolic.numbers import numbers, with_numbers


@dataclass(frozen=True)
class SymbolicProgram:
    """A program in which every number is a form of the symbols.

    ``reference``: the program at ``point``. ``forms``: those of its numbers, in order. ``axes``: the symbols that are
    axes of the mesh.
    """

    reference: Program
    forms: Sequence[Form]
    point: Point
    axes: Sequence[str]

    @property
    def moving_axes(self) -> list[str]:
        """The axes that may have other sizes: those of more than one rank, except a pipeline's."""
        pipeline = self.reference.options.pipeline
        fixed = pipeline.axis if pipeline else None
        return [name for name in self.axes if name != fixed and self.point[name] > 1]

    def at(self, point: Point) -> Program:
        """The program at other sizes."""
        return with_numbers(self.reference, self._mesh(point), [form.at(point) for form in self.forms])

    def agrees(self, point: Point, program: Program) -> bool:
        """Whether a program with this outline has the numbers of the forms at a point."""
        return [form.exact(point) for form in self.forms] == [size for _, size in numbers(program)]

    @cached_property
    def expressed(self) -> Program:
        """The program with expressions for its numbers and local types."""
        return _localized(self._in_symbols, _even_pieces(self.cuts))

    @cached_property
    def cuts(self) -> tuple[CutCondition, ...]:
        """The cuts of all values, and of parameters as they are computed on; a dim that is not cut is cut by 1."""
        is_even = functools.cache(lambda size, shards: value(size, self.point) % value(shards, self.point) == 0)
        conditions: dict[CutCondition, None] = {}
        program = self._in_symbols
        stored = {name: program.types(node)[0] for (_, name), node in program.named_inputs.items()}
        pairs: list[tuple[TensorType | None, Sharding | None]]
        pairs = [(stored[name], sharding) for name, sharding in program.computed.items()]
        for node in program.graph.nodes:
            if node.op != "output":
                pairs += zip(program.types(node), program.shardings(node), strict=False)
        for type_, sharding in dict.fromkeys(pairs):
            for dim, size in zip(sharding.dims if sharding else (), type_.shape if type_ else (), strict=True):
                for sub, axes in dim.subdims(size):
                    if axes or not getattr(sub, "is_integer", True):
                        shards = num_shards(axes)
                        conditions[CutCondition(sub, shards, is_even(sub, shards))] = None
        return tuple(conditions)

    def whole_numbers(self) -> Iterator[CutCondition]:
        """The conditions that every number is a whole one: half of a size needs an even size."""
        import sympy

        symbols = symbols_of(self.point)
        for form in dict.fromkeys(self.forms):
            size, parts = sympy.fraction(sympy.together(form.expression(symbols)))
            if parts != 1:
                yield CutCondition(size, parts, is_even=True)

    def without_rounding(self, expression: Any) -> Any:
        """An expression in which sizes that this plan cuts evenly are not rounded up."""
        import sympy

        return sympy.sympify(expression).xreplace(_even_pieces(self.cuts))

    @cached_property
    def _in_symbols(self) -> Program:
        symbols = symbols_of(self.point)
        express = functools.cache(lambda form: form.expression(symbols))
        return with_numbers(self.reference, self._mesh(symbols), list(map(express, self.forms)))

    def _mesh(self, sizes: Mapping[str, Any]) -> Mesh:
        """The program's mesh with other sizes, which may be symbols; of a pipeline the mesh of one stage."""
        old, mesh = self.reference.mesh, Mesh.__new__(Mesh)
        assert old is not None
        fixed = {MICROBATCH, old.stage_axis}
        mesh.axis_names, mesh.device_ids, mesh.stage_axis = old.axis_names, None, old.stage_axis
        mesh.shape = tuple(size if name in fixed else sizes[name] for name, size in old.sizes.items())
        return mesh


def mesh_at(axes: Sequence[str], point: Point) -> Mesh:
    """The mesh of these axes at a point."""
    return Mesh(device_ids=None, **{name: point[name] for name in axes})


def _even_pieces(cuts: Iterable[CutCondition]) -> dict[Any, Any]:
    """For each even cut the expression that rounds its pieces, and the piece itself."""
    import sympy

    pieces = [-sympy.sympify(cut.size) / cut.shards for cut in cuts if cut.is_even]
    return {sympy.floor(piece): piece for piece in pieces}


def _localized(program: Program, pieces: Mapping[Any, Any]) -> Program:
    """The program with local types, in which even cuts are not rounded up."""
    import sympy

    @functools.cache
    def local_shape(shape: tuple[Any, ...], sharding: Sharding) -> tuple[Any, ...]:
        sizes = sharding.local_shape(shape)
        return tuple(size if isinstance(size, int) else sympy.sympify(size).xreplace(pieces) for size in sizes)

    def local_type(type_: TensorType | None, sharding: Sharding | None) -> TensorType | None:
        if type_ is None or sharding is None:
            return type_
        return TensorType(local_shape(type_.shape, sharding), type_.dtype)

    program = program.copy(level="localized")
    for node in program.graph.nodes:
        if node.op != "output" and program.shardings(node):
            program.set_local_types(node, tuple(map(local_type, program.types(node), program.shardings(node))))
    return program
