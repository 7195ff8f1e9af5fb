"""A lowered program whose sizes are sympy expressions, and the conditions on sizes under which it stays the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.language.errors import ShardingError
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import Sharding, TensorType, num_shards
from shardc.language.windows import AROUND, FILLED, Windows, most_rows_sent
from shardc.ops.attention.rules import RINGS
from shardc.program.collective import EXCHANGES
from shardc.program.communication import members, ring_of
from shardc.program.program import Program
from shardc.report.symbolic.form import Form, Point, numbers, with_numbers

if TYPE_CHECKING:
    import sympy


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
        """The axes that may have other sizes: all with more than one rank, except a pipeline's and those in parts."""
        pipeline = self.reference.options.pipeline
        fixed = {pipeline.axis if pipeline else None, *self._axes_in_parts}
        return [name for name in self.axes if name not in fixed and self.point[name] > 1]

    @cached_property
    def _axes_in_parts(self) -> set[str]:
        """The axes of which only a part cuts some value, as when ranks share heads; other sizes have other parts."""
        mesh, nodes = self.reference.mesh, self.reference.graph.nodes
        assert mesh is not None
        shardings = {each for node in nodes if node.op != "output" for each in self.reference.shardings(node) if each}
        parts = {part for each in shardings for dim in each.dims for part in dim.all_axes}
        return {part.name for part in parts if part.size != mesh.axis_size(part.name)}

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
        """The cuts of all values, and of parameters as computed on; an uncut dim that may be fractional is cut by 1."""
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
        """The conditions for every number to be whole: half of a size needs an even size."""
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
        """The program's mesh with other sizes, which may be symbols; for a pipeline, the mesh of one stage."""
        old, mesh = self.reference.mesh, Mesh.__new__(Mesh)
        assert old is not None
        fixed = {MICROBATCH, old.stage_axis, *self._axes_in_parts}
        mesh.axis_names, mesh.device_ids, mesh.stage_axis = old.axis_names, None, old.stage_axis
        mesh.shape = tuple(size if name in fixed else sizes[name] for name, size in old.sizes.items())
        return mesh


def mesh_at(axes: Sequence[str], point: Point) -> Mesh:
    """The mesh of these axes at a point."""
    return Mesh(device_ids=None, **{name: point[name] for name in axes})


def _even_pieces(cuts: Iterable[CutCondition]) -> dict[Any, Any]:
    """The piece of each even cut without rounding, by the expression that rounds it."""
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


def count_rows(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """The rows that the busiest rank gives and takes in an exchange, for windows in numbers or in expressions.

    Asserts that windows in expressions have a row count: ``exchange_conditions`` raises for those that have none.
    """
    if all(isinstance(number, int) for number in values):
        return most_rows_sent(values)
    rows = _rows(Windows(*values))
    assert rows is not None, f"{values} have no row count"
    return rows, rows


def exchange_conditions(symbolic: SymbolicProgram) -> Iterator[Condition]:
    """The conditions under which neighbours exchange as many rows as their expressions say.

    Raises a ShardingError for an exchange without such conditions: chunks of several lengths, windows that move against
    their chunks, or rings of attention in which a mask hides rows.
    """
    for node, here in zip(symbolic.expressed.graph.nodes, symbolic.reference.graph.nodes, strict=True):
        ring = ring_of(here)
        if ring is not None and ring.sent is not None:
            raise _no_expression(symbolic, here, "keys and values go round", HIDDEN, BY_SIZES)
        if any(part.kind == "rechunk" for part in members(node)):
            raise _not_alike(symbolic, here)
        expressed: tuple[Any, ...] = node.args
        numbers: tuple[Any, ...] = here.args
        if node.target in EXCHANGES and node.target not in RINGS and numbers[1]:
            conditions = _conditions(Windows(*expressed[3]), Windows(*numbers[3]), symbolic.point)
            if conditions is None:
                raise _not_alike(symbolic, here)
            yield from conditions


def _conditions(window: Windows, here: Windows, point: Point) -> list[Condition] | None:
    """The conditions of windows, given in expressions and in numbers at a point; None if they have no row count."""
    import sympy

    step = abs(here.stride)
    if all(isinstance(number, int) for number in window.values):  # as on a mesh that is fixed
        return []
    if window == Windows(window.count, window.length, window.length, 0):  # the windows are the chunks
        return []
    left_over = sympy.expand(window.length - step * window.total)
    is_aligned = here.length % here.count == 0 and here.chunk * step * here.count == here.length
    is_fixed = isinstance(window.span, int) and getattr(left_over, "is_number", True) and left_over < 2 * step
    is_known = here.beyond == FILLED or (here.beyond == AROUND and here.span == here.stride == 1)
    if not is_aligned or not is_fixed or here.fixed_shard_size or not is_known:
        return None
    rows = _rows(window)
    if rows is None or value(rows, point) != most_rows_sent(here.values)[0]:
        return None
    conditions: list[Condition] = [CutCondition(window.length, step * window.count, is_even=True)]
    margins = _margins(window) if here.stride > 0 else None
    if margins and max(margins) > 1:
        conditions.append(LengthCondition(window.length, window.count, max(margins)))
    return conditions


def _rows(window: Windows) -> Any | None:
    """The rows that the busiest rank gives to others; None if windows start at no fixed distance from their chunks.

    An end rank has only one neighbour, so neither of two ranks gives to both sides.
    """
    import sympy

    if window.stride < 0:
        return window.length / window.count
    margins = _margins(window)
    if margins is None:
        return None
    left, right = margins
    if window.beyond == AROUND or not left or not right:
        return left + right
    if left == right:
        return left * sympy.Min(2, window.count - 1)
    return max(left, right) + min(left, right) * sympy.Min(1, window.count - 2)


def _margins(window: Windows) -> tuple[int, int] | None:
    """The elements of a window before and behind its chunk; None if these are no fixed numbers.

    If windows go around the ends of a dim, only the elements on the side with fewer are counted.
    """
    import sympy

    is_around = window.beyond == AROUND
    before = sympy.expand(window.length - window.start) if is_around else -window.start
    behind = sympy.expand(window.start + window.span - window.stride)
    fixed = [int(each) if getattr(each, "is_number", True) else None for each in (before, behind)]
    if fixed.count(None) > is_around:
        return None
    left, right = (max(0, each or 0) for each in fixed)
    if is_around and None not in fixed:
        return (left, 0) if left < right else (0, right)
    return left, right


NOT_ALIKE = "the chunks are not alike or not moved by whole steps, and how many rows that are has no expression"
HIDDEN = "a mask hides keys, and how many of their rows a rank sees has no expression"
BY_SIZES = "count at sizes: --at ... --recompile"


def _not_alike(symbolic: SymbolicProgram, node: fx.Node) -> ShardingError:
    what = f"neighbours exchange the edges of their chunks of {symbolic.reference.type(node)}"
    return _no_expression(symbolic, node, what, NOT_ALIKE, f"start from sizes that the mesh divides, or {BY_SIZES}")


def _no_expression(symbolic: SymbolicProgram, node: fx.Node, what: str, problem: str, remedy: str) -> ShardingError:
    source = symbolic.reference.source(node)
    where = ", ".join(word for word in (source.module, source.location) if word) or "the model"
    return ShardingError(f"{node.name} in {where}", what, problem, remedy)


def symbols_of(names: Iterable[str]) -> dict[str, sympy.Symbol]:
    """A sympy symbol by each name: a positive whole number."""
    import sympy

    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


def names_in(expression: object) -> set[str]:
    """The names of the symbols in an expression; none in a number."""
    return {symbol.name for symbol in getattr(expression, "free_symbols", ())}


def value(expression: Any, point: Point) -> Any:
    """The exact value of an expression at a point: an int if it is whole."""
    import sympy

    symbols = getattr(expression, "free_symbols", ())
    result = sympy.sympify(expression).subs({symbol: point[symbol.name] for symbol in sorted(symbols, key=str)})
    return int(result) if result.is_integer else result


@dataclass(frozen=True, slots=True)
class CutCondition:
    """The condition that the size of a dim is, or is not, a multiple of its ``shards``; both are expressions."""

    size: Any
    shards: Any
    is_even: bool

    def holds(self, point: Point) -> bool:
        """Whether the condition holds at a point."""
        return (value(self.size, point) % value(self.shards, point) == 0) == self.is_even

    def missing_factor(self, point: Point) -> int:
        """The smallest factor that makes the size at a point one that is cut evenly."""
        import sympy

        return int(sympy.Rational(value(self.size, point), value(self.shards, point)).q)

    def text(self) -> str:
        """``B is a multiple of 4*dp``."""
        import sympy

        whole, parts = sympy.fraction(sympy.together(sympy.sympify(self.size) / self.shards))
        return f"{whole} is {'a' if self.is_even else 'no'} multiple of {parts}"


@dataclass(frozen=True, slots=True)
class LengthCondition:
    """The condition that each of ``shards`` chunks of a dim has the ``rows`` elements that its neighbours take."""

    size: Any
    shards: Any
    rows: int

    def holds(self, point: Point) -> bool:
        """Whether the condition holds at a point."""
        return bool(value(self.size, point) >= self.rows * value(self.shards, point))

    def text(self) -> str:
        """``H is 2*tp or more``."""
        return f"{self.size} is {self.rows}*{self.shards} or more"


Condition = CutCondition | LengthCondition


def independent(cuts: Sequence[CutCondition]) -> list[CutCondition]:
    """The conditions that no others imply, in their shortest form."""
    from sympy import expand, sympify

    shortest = [_without_multiples(cut) for cut in _joined_numbers(cuts)]
    conditions = [cut for cut in shortest if not expand(sympify(cut.size) / cut.shards).is_integer]
    even = {cut: sympify(cut.size) / cut.shards for cut in conditions if cut.is_even}
    symbols = {cut.size: cut.shards for cut in even if getattr(cut.size, "is_Symbol", False)}

    def is_implied(cut: CutCondition) -> bool:
        if not cut.is_even or not names_in(cut.size):
            return False
        if any((even[cut] / other).is_integer for other in even.values() if other != even[cut]):
            return True
        quotient = even[cut]
        for symbol, shards in symbols.items():
            if symbol != cut.size and quotient.has(symbol):
                quotient = quotient.subs(symbol, symbol * shards)
        return bool(expand(quotient).is_integer)

    return [cut for cut in dict.fromkeys(conditions) if not is_implied(cut)]


def _without_multiples(cut: CutCondition) -> CutCondition:
    """An even cut of a sum without the summands that are multiples: ``H + 2*n`` by ``n`` becomes ``H`` by ``n``."""
    from sympy import Add, expand, fraction, sympify, together

    if not cut.is_even or not names_in(cut.size):
        return cut
    summands = Add.make_args(expand(sympify(cut.size) / cut.shards))
    size, shards = fraction(together(Add(*(each for each in summands if not each.is_integer))))
    return CutCondition(size, shards, is_even=True)


def _joined_numbers(cuts: Sequence[CutCondition]) -> list[CutCondition]:
    """The conditions; all constant sizes that are cut by the same axes are joined into their common divisor."""
    divisors: dict[Any, int] = {}
    for cut in cuts:
        if cut.is_even and not names_in(cut.size):
            divisors[cut.shards] = math.gcd(divisors.get(cut.shards, 0), int(cut.size))
    others = [cut for cut in cuts if not cut.is_even or names_in(cut.size)]
    return [*others, *(CutCondition(size, shards, is_even=True) for shards, size in divisors.items())]
