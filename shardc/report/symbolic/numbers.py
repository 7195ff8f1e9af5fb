"""The numbers of a program: listing them, replacing them, and the outline that is left without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from shardc.language.mesh import Axes, AxisPart, Mesh
from shardc.language.sharding import DimSharding, Sharding, TensorType
from shardc.ops.pointwise import is_pointwise
from shardc.program.program import Program

Number = Any  # an int; a sympy.Expr where sizes have names
NumberKey = tuple[str, ...]  # a node's module, phase and op, which of these it is in that module; which of its numbers


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
    """A copy of a program in which ``visit``, given a number and its key, returns the number in its place."""

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
        """Each node with its module, phase and op, and which of these in that module it is."""
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
    """The program without its numbers, a line a node: two programs of one outline have one plan."""
    return [_line(program, node) for node in program.graph.nodes]


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first lines of two outlines that differ; nothing where they are equal."""
    pairs = zip([*ours, ""], [*theirs, ""], strict=False)
    mine, other = next(((mine, other) for mine, other in pairs if mine != other), ("", ""))
    if mine == other:
        return ""
    return f"{mine.partition(' [')[0] or 'the end'} is {other.partition(' [')[0] or 'the end'} there"


def _line(program: Program, node: fx.Node) -> str:
    def blank(leaf: Any) -> Any:
        return "#" if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else str(leaf)

    source, args = program.source(node), map_aggregate((node.args, dict(node.kwargs)), blank)
    types = [None if each is None else (len(each.shape), str(each.dtype)) for each in program.types(node)]
    cuts = [each and _cuts(each) for each in program.shardings(node)]
    stage = f" (stage {source.stage})" if source.stage >= 0 else ""
    return f"{source.phase} {source.module}{stage}: {node.name} {types} {cuts} = {_op_name(node.target)} {args}"


def _op_name(target: Any) -> str:
    """The name of an op, the same in every process."""
    return str(target) if isinstance(target, str) or hasattr(target, "_schema") else str(target.__name__)


def _cuts(sharding: Sharding) -> tuple[Any, ...]:
    def names(axes: Axes) -> str:
        return "+".join(part.name if sharding.mesh.is_whole(part) else f"{part.name}:()" for part in axes)

    dims = [(names(dim.axes), *(names(axes) for _, axes in dim.minor)) for dim in sharding.dims]
    return (*dims, *((names((part,)), op) for part, op in sharding.partial))
