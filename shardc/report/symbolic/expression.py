"""A program whose sizes are sympy expressions in the symbols, and which of its dims are cut evenly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.fx.node import map_aggregate

from shardc.language.errors import ShardingError
from shardc.language.mesh import MICROBATCH, Axes, AxisPart, Mesh
from shardc.language.sharding import DimSharding, Sharding, TensorType, num_shards
from shardc.language.windows import AROUND, FILLED, Windows, most_rows_sent
from shardc.ops.pointwise import is_pointwise
from shardc.program.collective import EXCHANGES
from shardc.program.communication import members
from shardc.program.program import Program
from shardc.report.symbolic.form import Form, Point

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


@dataclass(frozen=True, slots=True)
class Reach:
    """Each of ``shards`` chunks of a dim has as many elements as its neighbours take of it: ``rows`` or more."""

    size: Any
    shards: Any
    rows: int

    def holds(self, point: Point) -> bool:
        """Whether it is so at a point."""
        return bool(value(self.size, point) >= self.rows * value(self.shards, point))

    def text(self) -> str:
        """As one says it."""
        return f"{self.size} is {self.rows}*{self.shards} or more"


def count_rows(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """The rows that the busiest rank gives and takes in an exchange, of windows in numbers or in expressions.

    Asserts that windows in expressions have a row count, as ``conditions`` checks.
    """
    if all(isinstance(number, int) for number in values):
        return most_rows_sent(values)
    rows = rows_expressed(Windows(*values))
    assert rows is not None, f"{values} have no row count"
    return rows, rows


def rows_expressed(window: Windows) -> Any | None:
    """Rows that the busiest rank gives to others, as an expression; None where windows start at no fixed distance.

    An end rank has one neighbour alone, so that of two ranks none gives to both sides.
    """
    import sympy

    if window.stride < 0:
        return window.length / window.count
    reach = _reach(window)
    if reach is None:
        return None
    left, right = reach
    if window.beyond == AROUND or not left or not right:
        return left + right
    if left == right:
        return left * sympy.Min(2, window.count - 1)
    return max(left, right) + min(left, right) * sympy.Min(1, window.count - 2)


def _reach(window: Windows) -> tuple[int, int] | None:
    """Elements before a chunk and behind it that its window has; around, on the side where they are fewer.

    None where these are no fixed numbers.
    """
    import sympy

    fixed = [
        int(each) if getattr(each, "is_number", True) else None
        for each in (
            sympy.expand(window.length - window.start) if window.beyond == AROUND else -window.start,
            sympy.expand(window.start + window.span - window.stride),
        )
    ]
    known = [each for each in fixed if each is not None]
    if not known or (window.beyond != AROUND and len(known) < 2):
        return None
    before, behind = (max(0, each or 0) for each in fixed)
    if window.beyond == AROUND and len(known) == 2:
        return (before, 0) if before < behind else (0, behind)
    return before, behind


def reaches(symbolic: Symbolic) -> Iterator[Cut | Reach]:
    """Where what neighbours exchange is as its expression says.

    Raises a ShardingError for what has none: chunks of several lengths, windows that move against the chunks.
    """
    program, _ = symbolic.expressed
    for node, here in zip(program.graph.nodes, symbolic.reference.graph.nodes, strict=True):
        if any(part.kind == "rechunk" for part in members(node)):
            raise _no_expression(symbolic, here)
        expressed: tuple[Any, ...] = node.args
        numbers: tuple[Any, ...] = here.args
        if node.target in EXCHANGES and numbers[1]:
            found = _conditions(Windows(*expressed[3]), Windows(*numbers[3]), symbolic.point)
            if found is None:
                raise _no_expression(symbolic, here)
            yield from found


def _conditions(window: Windows, here: Windows, point: Point) -> list[Cut | Reach] | None:
    """Of windows given as expressions and as numbers at a point; None where they have no expression."""
    import sympy

    most, step = most_rows_sent(here.values)[0], abs(here.stride)
    if all(isinstance(number, int) for number in window.values):  # as on a mesh that is held
        return []
    if window == Windows(window.count, window.length, window.length, 0):  # chunks as they are
        return []
    left_over = sympy.expand(window.length - step * window.total)
    is_aligned = here.length % here.count == 0 and here.chunk * step * here.count == here.length
    is_fixed = isinstance(window.span, int) and getattr(left_over, "is_number", True) and left_over < 2 * step
    is_known = here.beyond == FILLED or (here.beyond == AROUND and here.span == here.stride == 1)
    if not is_aligned or not is_fixed or here.fixed_shard_size or not is_known:
        return None
    rows = rows_expressed(window)
    if rows is None or value(rows, point) != most:
        return None
    found: list[Cut | Reach] = [Cut(window.length, step * window.count, is_even=True)]
    reach = _reach(window) if here.stride > 0 else None
    if reach and max(reach) > 1:
        found.append(Reach(window.length, window.count, max(reach)))
    return found


def _no_expression(symbolic: Symbolic, node: fx.Node) -> ShardingError:
    source = symbolic.reference.source(node)
    where = ", ".join(word for word in (source.module, source.location) if word) or "the model"
    return ShardingError(
        f"{node.name} in {where}",
        f"neighbours exchange the edges of their chunks of {symbolic.reference.type(node)}",
        "the chunks are not alike or not moved by whole steps, and how many rows that are has no expression",
        "start from sizes that the mesh divides, or count at sizes: --at ... --recompile",
    )
