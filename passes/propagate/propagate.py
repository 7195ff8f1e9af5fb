"""propagate: canonical -> annotated. A sharding on every value, from the few that the user fixed.

Cuts flow both ways over the factors of each op's rule until nothing changes. Rounds go by priority, and within one
inputs and annotated values speak before parameters, so that an axis on the batch outranks the same axis on a weight;
but where a value alone is cut by an axis of the parameters, the parameters compute so and the value has its say last.
In a round all ops but contractions go first. A gradient is tied to its parameter, a new buffer value to its buffer::

    x: f32[8@dp, 64]   w: f32[64, 256@tp]
    y = dot(x, w, "a b, b c -> a c")                ->      y: f32[8@dp, 256@tp] = dot(...)

State: for each value its dims, the dims that may not change, the axes kept for them, and where each axis came from. A
step takes one op, brings its tensors' cuts to a common longest form factor by factor, those of the largest tensor first
since it would cost most to move, and queues the ops around each value that changed.
Invariants: pinned dims never move; an axis cuts a value once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardc.language.cut import dims_sharding, extends, factor_cuts
from shardc.language.mesh import MICROBATCH, Axes, Mesh
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, num_shards
from shardc.ops.contraction import dot
from shardc.program.node import is_getitem
from shardc.program.program import Pin, Program, Value, ends_of
from shardc.program.provenance import Origin

from .pins import PARAMETER_KINDS, Ranks, annotated_values, promotion


def propagate(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """The program with a sharding on every value. Over the axes ``first`` parameters speak first."""
    program = program.copy(level="annotated")
    assert program.mesh is not None
    pins = tuple(dict.fromkeys((*program.pins, *annotated_values(program))))
    state = _spread(program, program.mesh, pins, first)
    promoted = state.promoted
    if promoted:
        pins = tuple(promoted.get(pin, pin) for pin in pins)
        state = _spread(program, program.mesh, pins, first)
    state.write()
    return replace(program, pins=pins, notes=program.notes + tuple(map(promotion, promoted.items())))


def _spread(program: Program, mesh: Mesh, pins: tuple[Pin, ...], first: frozenset[str]) -> _State:
    state = _State(program, mesh)
    for pin in pins:
        state.close(pin)
    ranks = Ranks(pins, first)
    for priority, rank in sorted({(pin.priority, rank) for pin in pins for rank in ranks.of(pin)}):
        state.start([pin for pin in pins if pin.priority == priority and rank in ranks.of(pin)], ranks, rank)
        state.settle(contractions=False)
        state.settle(contractions=True)
    return state


@dataclass(slots=True)
class _State:
    program: Program
    mesh: Mesh
    dims: dict[Value, list[DimSharding]] = field(default_factory=dict)
    shapes: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    closed: dict[Value, set[int]] = field(default_factory=dict)
    reserved: dict[Value, Axes] = field(default_factory=dict)
    stored: set[Value] = field(default_factory=set)
    origins: dict[Value, dict[str, Origin]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    around: dict[Value, list[int]] = field(default_factory=dict)
    roots: dict[int, Pin] = field(default_factory=dict)
    promoted: dict[Pin, Pin] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        inputs = self.program.named_inputs
        self.stored = {(node, 0) for (kind, _), node in inputs.items() if kind in PARAMETER_KINDS}
        for node in self.program.graph.nodes:
            if node.op == "placeholder" or (node.op == "call_function" and not is_getitem(node)):
                for index, type_ in enumerate(self.program.types(node)):
                    if type_ is not None:
                        self.dims[node, index] = [WHOLE] * len(type_.shape)
                        self.shapes[node, index] = type_.shape
        for op in (*ops_of(self.program), *ties_of(self.program)):
            for value in dict.fromkeys(value for value in op.values if value is not None):
                self.around.setdefault(value, []).append(len(self.ops))
            self.ops.append(op)

    def close(self, pin: Pin) -> None:
        """From the start no one but the user moves a pinned dim, and its axes are kept for it."""
        value = self._pinned(pin)
        self.closed[value] = set(range(len(self.shapes[value]))) - pin.open
        self.reserved[value] = pin.sharding.cut_axes

    def start(self, pins: Iterable[Pin], ranks: Ranks, rank: int) -> None:
        """Set the pins' dims of a round, and queue the ops around them; ops that waited get another turn."""
        for pin in pins:
            value = self._pinned(pin)
            for dim, cut in enumerate(pin.sharding.dims):
                if dim in pin.open or ranks.rank(pin, dim) != rank:
                    continue
                self.dims[value][dim] = cut
                for part in cut.all_axes:
                    origin = self.origins.setdefault(value, {})[part.name] = self._root_origin(pin, part.name, rank)
                    self.roots[id(origin)] = pin
            self._queue_around(value)

    def _root_origin(self, pin: Pin, axis: str, rank: int) -> Origin:
        pipeline = self.program.options.pipeline
        text = pipeline.text if pipeline and axis == MICROBATCH else pin.text
        return Origin(text, rank, _at(self._pinned(pin)))

    def _pinned(self, pin: Pin) -> Value:
        if pin.kind == "value":
            return next((node, 0) for node in self.program.calls if node.name == pin.name)
        if pin.kind != "output":
            return self.program.value(self.program.named_inputs[pin.kind, pin.name])
        names = [output.name if output.kind == "output" else None for output in self.program.outputs]
        result = self.program.results[names.index(pin.name)]
        assert result is not None, pin
        return self.program.value(result)

    def _queue_around(self, value: Value) -> None:
        for index in self.around.get(value, ()):
            heapq.heappush(self.queue, index)

    def settle(self, contractions: bool) -> None:
        """Run queued ops until nothing changes; without ``contractions`` those wait."""
        if contractions:
            for index in self.waiting:
                heapq.heappush(self.queue, index)
            self.waiting = []
        while self.queue:
            index = heapq.heappop(self.queue)
            while self.queue and self.queue[0] == index:
                heapq.heappop(self.queue)
            if self.ops[index].is_contraction and not contractions:
                self.waiting.append(index)
            else:
                self._step(self.ops[index])

    def _step(self, op: Op) -> None:
        tensors = [
            (value, dims)
            for value, dims in zip(op.values, op.dims, strict=True)
            if value is not None and dims is not None
        ]
        for value, dims in tensors:
            self._promote(op, value, dims)
        cuts = [factor_cuts(dims, self.dims[value], self.shapes[value], op.rule.sizes) for value, dims in tensors]
        if not any(cuts):
            return
        sizes = [self._local_numel(value) for value, _ in tensors]
        factors = dict.fromkeys(factor for cut in cuts for factor in cut)
        for factor in sorted(
            factors, key=lambda name: -max(n for n, cut in zip(sizes, cuts, strict=True) if name in cut)
        ):
            if factor in op.rule.whole:
                continue
            sources = [i for i, cut in enumerate(cuts) if factor in cut]
            source = max(sources, key=lambda i: (len(cuts[i][factor].all_axes), -i))
            cut = _common(cuts[source][factor], [cuts[i][factor] for i in sources])
            if cut == WHOLE or not op.rule.may_pass(factor, cut):
                continue
            for i, (value, dims) in enumerate(tensors):
                if op.rule.has(factor, dims) and not extends(cuts[i].get(factor, WHOLE), cut):
                    self._extend(op, value, dims, cuts[i], factor, cut, tensors[source][0])

    def _local_numel(self, value: Value) -> int:
        return math.prod(dim.local_size(size) for dim, size in zip(self.dims[value], self.shapes[value], strict=True))

    def _promote(self, op: Op, value: Value, dims: Dims) -> None:
        """A parameter cut plainly, of which an op takes equal blocks apart, is to be cut within each block.

        So does a split of a dim in whole blocks, or a view of it as ``(3, heads, width)`` whose 3 the axes do not cut.
        """
        for factors, cut, size in zip(dims, self.dims[value], self.shapes[value], strict=True):
            if cut.axes and not cut.minor and _takes_blocks(op.rule, factors, num_shards(cut.axes)):
                pin, block = self._root(value, cut), size // op.rule.sizes[factors[0]]
                if pin is not None and block % num_shards(cut.axes) == 0 and block < size:
                    dim = pin.sharding.dims.index(cut)
                    within = pin.sharding.with_dim(dim, DimSharding((), ((block, cut.axes),)))
                    if self.shapes[self._pinned(pin)][dim] == size:
                        self.promoted[pin] = replace(pin, sharding=within)

    def _root(self, value: Value, cut: DimSharding) -> Pin | None:
        """The parameter's pin that a cut came from, where it is that pin's own cut."""
        origin = self.origins[value].get(cut.axes[0].name)
        pin = self.roots.get(id(origin.chain[0])) if origin else None
        return pin if pin is not None and pin.kind in PARAMETER_KINDS and cut in pin.sharding.dims else None

    def _extend(
        self,
        op: Op,
        value: Value,
        dims: Dims,
        cuts: dict[str, DimSharding],
        factor: str,
        cut: DimSharding,
        source: Value,
    ) -> None:
        """Cut a factor of a value further, where its dim is open, by the leading axes that are free there."""
        dim = next(i for i, factors in enumerate(dims) if factor in factors)
        before = cuts.get(factor, WHOLE)
        cut = self._free(value, cut, before)
        new_parts = [part for part in cut.all_axes if part not in before.all_axes]
        is_closed = dim in self.closed.get(value, ()) and any(part.name != MICROBATCH for part in new_parts)
        if is_closed or not new_parts or not op.rule.may_pass(factor, cut):
            return
        if factor in op.rule.chunks and num_shards(cut.axes) > self.shapes[value][dim]:
            return  # a dim of few elements would be chunks of one, most of them none
        if dims_sharding((dims[dim],), cuts, op.rule.sizes)[0] != self.dims[value][dim]:
            return  # the dim has cuts that do not line up with this op's factors
        cuts[factor] = cut
        found = dims_sharding((dims[dim],), cuts, op.rule.sizes)[0]
        if value in self.stored and not self._is_storable(found, self.shapes[value][dim]):
            return
        self.dims[value][dim] = found
        for part in new_parts:
            came = self.origins[source][part.name].through(op.name, _at(value))
            self.origins.setdefault(value, {}).setdefault(part.name, came)
        self._queue_around(value)

    def _free(self, value: Value, cut: DimSharding, before: DimSharding) -> DimSharding:
        """The leading part of a cut whose axes cut the value already so, or not at all."""
        used = [*self.reserved.get(value, ()), *(part for dim in self.dims[value] for part in dim.all_axes)]
        free = [part in before.all_axes or not any(part.overlaps(other) for other in used) for part in cut.all_axes]
        if all(free):
            return cut
        return before if cut.minor else DimSharding(cut.axes[: free.index(False)])

    def _is_storable(self, cut: DimSharding, size: int) -> bool:
        """Whether a DTensor can lie so: no part of an axis, and no uneven cut that torch would make otherwise."""
        sharding = Sharding(self.mesh, (cut,))
        is_whole = all(map(self.mesh.is_whole, cut.all_axes)) and MICROBATCH not in [p.name for p in cut.all_axes]
        return is_whole and sharding.storable((size,)) == sharding

    def write(self) -> None:
        """Put what was found on the nodes."""
        for node in self.program.graph.nodes:
            if (node, 0) not in self.dims and not self.program.has_many(node):
                continue
            found = tuple(
                Sharding(self.mesh, tuple(self.dims[node, index])) if (node, index) in self.dims else None
                for index in range(len(self.program.types(node)))
            )
            self.program.set_sharding(node, found if self.program.has_many(node) else found[0])
            self.program.set_origins(node, tuple(self.origins.get((node, index), {}) for index in range(len(found))))


def _at(value: Value) -> tuple[str, int]:
    return value[0].name, value[1]


def _common(longest: DimSharding, cuts: list[DimSharding]) -> DimSharding:
    """The longest cut, where it extends all others; else the leading axes that all have."""
    if all(extends(longest, cut) for cut in cuts):
        return longest
    count = 0
    while not any(cut.minor for cut in cuts) and len({cut.axes[: count + 1] for cut in cuts}) == 1:
        count += 1
    return DimSharding(longest.axes[:count])


def _takes_blocks(rule: Rule, factors: tuple[str, ...], shards: int) -> bool:
    """Whether the first factor of a dim counts blocks that cuts in ``shards`` do not line up with."""
    if len(factors) > 1 and factors[0] in rule.whole:
        return True
    return len(factors) > 2 and bool(rule.sizes[factors[0]] % shards and shards % rule.sizes[factors[0]])


@dataclass(frozen=True, slots=True)
class Op:
    """A rule over values: an op of the graph, or a tie. ``values``, and their ``dims``: operands, then results."""

    name: str
    rule: Rule
    values: tuple[Value | None, ...]
    dims: tuple[Dims | None, ...]
    is_contraction: bool = False


def ops_of(program: Program) -> Iterator[Op]:
    """Those of the graph."""
    for node in program.calls:
        rule = program.rule(node)
        made = tuple(None if type_ is None else (node, i) for i, type_ in enumerate(program.types(node)))
        values = program.operand_values(node) + made
        yield Op(node.name, rule, values, rule.operands + rule.results, node.target is dot)


def ties_of(program: Program) -> Iterator[Op]:
    """Gradients and new buffer values lie as what they belong to; a tangent lies as its output."""
    inputs = program.named_inputs
    for output, owner, node in ends_of(program):
        partner = inputs.get(("tangent", output.name)) if output.kind == "output" else owner
        if node is not None and partner is not None:
            yield _tie(program, f"the {output.kind} {output.name}", program.value(node), program.value(partner))


def _tie(program: Program, name: str, one: Value, other: Value) -> Op:
    sizes = {f"d{i}": size for i, size in enumerate(program.value_type(one).shape)}
    dims = tuple((name,) for name in sizes)
    return Op(name, Rule((dims,), (dims,), sizes), (one, other), (dims, dims))
