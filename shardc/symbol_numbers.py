"""The numbers of a program that depend on sizes: where each stands, what is left without them, and others in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from shardc.mesh import Axes, AxisPart, Mesh
from shardc.node import is_pointwise
from shardc.program import Program
from shardc.sharding import DimSharding, Sharding, TensorType

Number = Any  # an int; a sympy.Expr where sizes have names
Key = tuple[str, ...]  # of what node a number is: its module, phase and op, and which of them; which of its numbers


def numbers(program: Program) -> list[tuple[Key, int]]:
    """Every number of arguments, types and shardings, in order, each with what it is a number of."""
    found: list[tuple[Key, int]] = []

    def visit(key: Key, number: int) -> int:
        found.append((key, number))
        return number

    assert program.mesh is not None
    _Rewrite(program, program.mesh, visit).run()
    return found


def with_numbers(program: Program, mesh: Mesh, new: Sequence[Number]) -> Program:
    """The same program with other numbers, in the order of ``numbers``, on a mesh of the same axes."""
    left = iter(new)
    made = _Rewrite(program, mesh, lambda key, number: next(left)).run()
    assert next(left, None) is None, "more numbers than the program has"
    return made


def outline(program: Program) -> list[str]:
    """What is left of a program without its numbers, a line a node: two programs of one outline are one plan."""
    return [_line(program, node) for node in program.graph.nodes]


def _line(program: Program, node: fx.Node) -> str:
    def blank(leaf: Any) -> Any:
        return "#" if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else str(leaf)

    source, args = program.source(node), map_aggregate((node.args, dict(node.kwargs)), blank)
    types = [None if each is None else (len(each.shape), str(each.dtype)) for each in program.types(node)]
    cuts = [each and _cuts(each) for each in program.shardings(node)]
    stage = f" (stage {source.stage})" if source.stage >= 0 else ""
    return f"{source.phase} {source.module}{stage}: {node.name} {types} {cuts} = {_name(node.target)} {args}"


def _name(target: Any) -> str:
    """Of an op, the same in every process."""
    return str(target) if isinstance(target, str) or hasattr(target, "_schema") else str(target.__name__)


def _cuts(sharding: Sharding) -> tuple[Any, ...]:
    def names(axes: Axes) -> str:
        return "+".join(part.name if sharding.mesh.is_whole(part) else f"{part.name}:()" for part in axes)

    dims = [(names(dim.axes), *(names(axes) for _, axes in dim.minor)) for dim in sharding.dims]
    return (*dims, *((names((part,)), op) for part, op in sharding.partial))


class _Rewrite:
    """``visit`` is told of each number what it is of and what it is, and says what it becomes."""

    def __init__(self, program: Program, mesh: Mesh, visit: Callable[[Key, int], Number]) -> None:
        self.program, self.mesh, self.visit = program.copy(), mesh, visit
        self.old, self.slot = program.mesh, 0
        self.key: Key = ()
        assert self.old is not None

    def run(self) -> Program:
        program = self.program
        inputs = []
        for given in program.inputs:
            self._at(("input", given.kind, given.name))
            inputs.append(replace(given, type=self._type(given.type)))
        computed = {}
        for name, sharding in program.computed.items():
            self._at(("computed", name))
            computed[name] = self._sharding(sharding)
        pins = []
        for pin in program.pins:
            self._at(("pin", pin.kind, pin.name))
            pins.append(replace(pin, sharding=self._sharding(pin.sharding)))
        for key, node in self._keyed():
            self._at(key)
            self._rewrite(node)
        return replace(program, mesh=self.mesh, inputs=tuple(inputs), computed=computed, pins=tuple(pins))

    def _at(self, key: Key) -> None:
        self.key, self.slot = key, 0

    def _new(self, number: int) -> Number:
        self.slot += 1
        return self.visit((*self.key, str(self.slot)), number)

    def _keyed(self) -> Iterator[tuple[Key, fx.Node]]:
        """Each node with its module, phase and op, and which of these in that module it is."""
        count: dict[Key, int] = {}
        names = {
            node: (put.kind, put.name) for put, node in zip(self.program.inputs, self.program.placeholders, strict=True)
        }
        for node in self.program.graph.nodes:
            source = self.program.source(node)
            key = names.get(node) or (source.module, source.phase, _name(node.target))
            count[key] = count.get(key, -1) + 1
            yield (*key, str(count[key])), node

    def _rewrite(self, node: fx.Node) -> None:
        program = self.program
        types, shardings = program.types(node), program.shardings(node)
        has_many = program.has_many(node)
        if not is_pointwise(node.target):  # of which a number is no size
            node.args = map_aggregate(node.args, self._leaf)
            node.kwargs = map_aggregate(node.kwargs, self._leaf)
        if node.op == "output":
            return
        made = tuple(None if each is None else self._type(each) for each in types)
        program.set_type(node, made if has_many else made[0])
        if shardings:
            lie = tuple(None if each is None else self._sharding(each) for each in shardings)
            program.set_sharding(node, lie if has_many else lie[0])
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
        """A whole axis is one on the other mesh; of its parts the sizes are numbers."""
        assert self.old is not None
        if self.old.is_whole(part):
            return self.mesh.axis(part.name)
        return AxisPart(part.name, self._new(part.pre), self._new(part.size))
