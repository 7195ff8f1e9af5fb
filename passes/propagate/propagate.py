"""propagate: canonical -> annotated. A sharding on every value, from the few that the user annotated.

Cuts flow both ways over the factors of each op's rule until nothing changes. Rounds go by priority. Within a priority,
inputs and annotated values come before parameters, so that an axis on the batch outranks the same axis on a weight
(see ``Precedence`` for the exceptions). In a round all ops but contractions go first. A gradient is tied to its
parameter, a new buffer value to its buffer::

    x: f32[8@dp, 64]   w: f32[64, 256@tp]
    y = dot(x, w, "a b, b c -> a c")                ->      y: f32[8@dp, 256@tp] = dot(...)

State: a ``_Tensor`` for each value, and a ``_Worklist`` of ops. A step takes one op and brings the cuts of its tensors
to a common form, factor by factor. It starts with the factors of the largest tensor, which would cost most to move, and
queues the ops around each value that changed.
Invariants: pinned dims never change; an axis cuts a value once.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from shardc.language.cut import dims_sharding, extends, factor_cuts
from shardc.language.errors import ShardingError, raise_all
from shardc.language.mesh import MICROBATCH, Axes, Mesh
from shardc.language.partition import P
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, num_shards
from shardc.language.size import plain
from shardc.ops.contraction import dot
from shardc.ops.pointwise import ANNOTATE
from shardc.program.node import arguments, is_getitem
from shardc.program.program import Pin, Program, Value, ends_of
from shardc.program.provenance import DATA, PARAMETER, PARAMETER_FIRST, YIELDING, Origin


def propagated(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """A copy of the program after ``propagate``."""
    return propagate(program.copy(), first)


def propagate(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """The program with a sharding on every value. For the axes named in ``first``, parameters come before inputs."""
    program = program.edited("annotated")
    pins = tuple(dict.fromkeys((*program.pins, *annotated_values(program))))
    tensors, precedence = _Tensors(program), Precedence(pins, first)
    worklist = _Worklist([*tensors.ops, *_ties(program, tensors)])
    values = map(tensors.at, pinned_values(program, pins))
    pinned = [(tensor, pin, precedence.rounds(pin)) for tensor, pin in zip(values, pins, strict=True)]
    for tensor, pin, _ in pinned:
        tensor.reserved = pin.sharding.cut_axes
    for now in sorted({each for *_, rounds in pinned for each in rounds}):
        for tensor, pin, rounds in pinned:
            tensor.closed = frozenset(dim for dim, each in enumerate(rounds) if not _is_open(pin, dim, each, now))
            if now in rounds:
                _cut_as_pinned(program, tensor, pin, [dim for dim, each in enumerate(rounds) if each == now], now[1])
                worklist.add_around(tensor)
        _settle(worklist)
    _write(program, tensors)
    program.pins = pins
    return program


def spread(program: Program, moved: Mapping[Value, tuple[Sharding, Mapping[str, Origin]]]) -> None:
    """Cut some values of an annotated program otherwise, if they are open, and let the new cuts flow to whole dims."""
    tensors = _Tensors(program)
    for node, own in tensors.of.items():
        for tensor, sharding, origins in zip(own, program.shardings(node), program.origins(node), strict=False):
            if tensor is not None:
                assert sharding is not None
                tensor.set_cuts(dict(enumerate(sharding.dims)), origins)
    for value, pin in zip(pinned_values(program, program.pins), program.pins, strict=True):
        tensor = tensors.at(value)
        tensor.closed = frozenset(range(len(tensor.shape))) - pin.open
    worklist = _Worklist([*tensors.ops, *_ties(program, tensors)])
    for value, (sharding, origins) in moved.items():
        tensor = tensors.at(value)
        changed = {dim: cut for dim, cut in enumerate(sharding.dims) if cut != tensor.dims[dim]}
        if tensor.closed.isdisjoint(changed):
            tensor.set_cuts(changed, origins)
            worklist.add_around(tensor)
    _settle(worklist)
    _write(program, tensors)


def _settle(worklist: _Worklist) -> None:
    """Step through the queued ops until none is left; contractions come last."""
    for with_contractions in (False, True):
        for op in worklist.drain(with_contractions):
            for tensor in _step(op):
                worklist.add_around(tensor)


def _write(program: Program, tensors: _Tensors) -> None:
    """Write the current shardings and origins of values to their nodes."""
    assert program.mesh is not None
    sharding_of = functools.cache(functools.partial(Sharding, program.mesh))  # equal shardings are one object
    for node, own in tensors.of.items():
        shardings = tuple([None if tensor is None else sharding_of(tensor.dims) for tensor in own])
        if any(shardings) or (own and program.has_many(node)):
            program.set_sharding(node, shardings if program.has_many(node) else shardings[0])
            program.set_origins(node, tuple([NO_ORIGINS if tensor is None else tensor.origins for tensor in own]))


NO_ORIGINS: Mapping[str, Origin] = {}  # of a value that is not cut


@dataclass(slots=True)
class _Tensor:
    """A value while cuts flow: the current cut of each dim, and the origin of each axis.

    ``mesh``: set for a parameter or a buffer, which must stay storable as a DTensor on it; None for other values.
    ``local_numel``: elements on one rank. ``around``: the ops that read or make it, by their place in the worklist.
    ``closed``: dims that the user fixed. ``reserved``: axes of the value's pin, which its other dims may not take.
    """

    node: fx.Node
    index: int
    shape: tuple[int, ...]
    mesh: Mesh | None
    dims: tuple[DimSharding, ...]
    local_numel: int
    around: list[int] = field(default_factory=list)
    closed: frozenset[int] = frozenset()
    reserved: Axes = ()
    origins: Mapping[str, Origin] = field(default_factory=lambda: NO_ORIGINS)

    @property
    def name(self) -> tuple[str, int]:
        """The value's name in origins."""
        return self.node.name, self.index

    def set_cuts(self, cuts: Mapping[int, DimSharding], origins: Mapping[str, Origin]) -> None:
        """Cut some dims, by axes with these origins."""
        self.dims = tuple([cuts.get(dim, cut) for dim, cut in enumerate(self.dims)])
        self.local_numel = plain(math.prod(map(DimSharding.local_size, self.dims, self.shape)))
        self.origins = {**self.origins, **origins}

    def free_part(self, cut: DimSharding, before: DimSharding) -> DimSharding:
        """The leading axes of a cut that are already in ``before`` or do not cut the value yet."""
        used = [*self.reserved, *(part for dim in self.dims for part in dim.all_axes)]
        free = [part in before.all_axes or not any(part.overlaps(other) for other in used) for part in cut.all_axes]
        if all(free):
            return cut
        return before if cut.minor else DimSharding(cut.axes[: free.index(False)])

    def is_storable(self, dim: int, cut: DimSharding) -> bool:
        """Whether the value may be stored with this cut: by whole axes, and cut unevenly only as torch would."""
        if self.mesh is None:
            return True
        if not all(self.mesh.is_whole(part) and part.name != MICROBATCH for part in cut.all_axes):
            return False
        sharding = Sharding(self.mesh, (cut,))
        return sharding.storable((self.shape[dim],)) == sharding


class Op(NamedTuple):
    """A rule over tensors, operands and then results: an op of the graph, or a tie."""

    name: str
    rule: Rule
    tensors: tuple[_Tensor | None, ...]
    is_contraction: bool = False


class _Tensors:
    """The values of a program, uncut. ``of``: the results of each node; ``ops``: the graph's ops, over the tensors."""

    def __init__(self, program: Program) -> None:
        self.of: dict[fx.Node, tuple[_Tensor | None, ...]] = {}
        self.ops: list[Op] = []
        stored = {node for (kind, _), node in program.named_inputs.items() if kind in PARAMETER_KINDS}
        for node in program.graph.nodes:
            if node.op == "output" or is_getitem(node):
                continue
            mesh, types = program.mesh if node in stored else None, enumerate(program.types(node))
            own = self.of[node] = tuple([None if type_ is None else _uncut(node, i, type_, mesh) for i, type_ in types])
            if node.op == "call_function":
                read = tuple([value and self.at(value) for value in program.operand_values(node)])
                self.ops.append(Op(node.name, program.rule(node), read + own, node.target is dot))

    def at(self, value: Value) -> _Tensor:
        """The tensor of a value."""
        tensor = self.of[value[0]][value[1]]
        assert tensor is not None, value
        return tensor


def _uncut(node: fx.Node, index: int, type_: TensorType, mesh: Mesh | None) -> _Tensor:
    return _Tensor(node, index, type_.shape, mesh, (WHOLE,) * len(type_.shape), plain(type_.numel))


def _is_open(pin: Pin, dim: int, own: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether propagation may cut an open dim of a pinned value in a round, once the pin's own cut is applied."""
    return dim in pin.open and (own <= now if pin.sharding.dims[dim] != WHOLE else own[0] <= now[0])


def _cut_as_pinned(program: Program, tensor: _Tensor, pin: Pin, dims: Iterable[int], rank: int) -> None:
    """Apply a pin to some dims; chains of origins start here."""
    pipeline = program.options.pipeline
    cuts = {dim: cut for dim in dims if (cut := pin.sharding.dims[dim]) != WHOLE}
    names = [part.name for cut in cuts.values() for part in cut.all_axes]
    text = {name: pipeline.text if pipeline and name == MICROBATCH else pin.text for name in names}
    tensor.set_cuts(cuts, {name: Origin(text[name], rank, tensor.name) for name in names})


class _Worklist:
    """Ops to step through, in program order."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._queue: list[int] = []
        self._waiting: list[int] = []  # contractions
        for index, op in enumerate(ops):
            for tensor in op.tensors:
                if tensor is not None:
                    tensor.around.append(index)

    def add_around(self, tensor: _Tensor) -> None:
        """Queue the ops that read or make a tensor."""
        for index in tensor.around:
            heapq.heappush(self._queue, index)

    def drain(self, with_contractions: bool) -> Iterator[Op]:
        """Pop the queued ops, including those added meanwhile; contractions wait until ``with_contractions``."""
        if with_contractions:
            self._queue = list(heapq.merge(sorted(self._queue), sorted(self._waiting)))
            self._waiting = []
        while self._queue:
            index = heapq.heappop(self._queue)
            while self._queue and self._queue[0] == index:
                heapq.heappop(self._queue)
            if self._ops[index].is_contraction and not with_contractions:
                self._waiting.append(index)
            else:
                yield self._ops[index]


def _ties(program: Program, tensors: _Tensors) -> Iterator[Op]:
    """Ops that tie gradients and new buffer values to the cuts of their inputs, and a tangent to that of its output."""
    inputs, rules = program.named_inputs, dict[tuple[int, ...], Rule]()
    for output, owner, node in ends_of(program):
        partner = inputs.get(("tangent", output.name)) if output.kind == "output" else owner
        if node is not None and partner is not None:
            pair = tensors.at(program.value(node)), tensors.at(program.value(partner))
            shape = pair[0].shape
            if shape not in rules:
                sizes = {f"d{i}": size for i, size in enumerate(shape)}
                dims = tuple((factor,) for factor in sizes)
                rules[shape] = Rule((dims,), (dims,), sizes)
            yield Op(f"the {output.kind} {output.name}", rules[shape], pair)


class _Side(NamedTuple):
    """A tensor of one op: its factors dim by dim, and the current cut of each factor."""

    tensor: _Tensor
    dims: Dims
    cuts: dict[str, DimSharding]


def _step(op: Op) -> list[_Tensor]:
    """Bring the tensors of an op to common cuts; return those that changed.

    If the rule lets none change, that is recorded with the rule, which equal ops share.
    """
    key = _step, tuple([None if tensor is None else tensor.dims for tensor in op.tensors])
    if key in op.rule.known:
        return []
    sides = [
        _Side(tensor, dims, factor_cuts(dims, tensor.dims, tensor.shape, op.rule.sizes))
        for tensor, dims in zip(op.tensors, op.rule.operands + op.rule.results, strict=True)
        if tensor is not None and dims is not None
    ]
    numel: dict[str, int] = {}  # by factor: local elements of the largest tensor in which it is cut
    for side in sides:
        for factor in side.cuts:
            numel[factor] = max(numel.get(factor, 0), side.tensor.local_numel)
    changed, is_settled = list[_Tensor](), True
    for factor in sorted(numel, key=numel.__getitem__, reverse=True):
        cut_sides = [side for side in sides if factor in side.cuts]
        source = max(cut_sides, key=lambda side: len(side.cuts[factor].all_axes))
        cut = _common(source.cuts[factor], [side.cuts[factor] for side in cut_sides])
        if factor in op.rule.whole or cut == WHOLE or not op.rule.may_pass(factor, cut):
            continue
        for side in sides:
            if not extends(side.cuts.get(factor, WHOLE), cut) and op.rule.has(factor, side.dims):
                is_settled = False
                if _extend(op, side, factor, cut, source.tensor.origins):
                    changed.append(side.tensor)
    if is_settled:
        op.rule.known[key] = True
    return changed


def _common(longest: DimSharding, cuts: list[DimSharding]) -> DimSharding:
    """The longest cut if it extends all others, else the leading axes that all have in common."""
    if all(extends(longest, cut) for cut in cuts):
        return longest
    count = 0
    while not any(cut.minor for cut in cuts) and len({cut.axes[: count + 1] for cut in cuts}) == 1:
        count += 1
    return DimSharding(longest.axes[:count])


def _extend(op: Op, side: _Side, factor: str, cut: DimSharding, origins: Mapping[str, Origin]) -> bool:
    """Cut a factor of a tensor further by the leading axes that are free there; return whether it changed.

    Nothing changes if its dim is closed.
    """
    tensor, rule = side.tensor, op.rule
    dim = next(i for i, factors in enumerate(side.dims) if factor in factors)
    before = side.cuts.get(factor, WHOLE)
    cut = tensor.free_part(cut, before)
    new_parts = [part for part in cut.all_axes if part not in before.all_axes]
    is_closed = dim in tensor.closed and any(part.name != MICROBATCH for part in new_parts)
    if is_closed or not new_parts or not rule.may_pass(factor, cut):
        return False
    if factor in rule.chunks and num_shards(cut.axes) > tensor.shape[dim]:
        return False  # a dim of few elements would become chunks of one element, most of them empty
    if dims_sharding((side.dims[dim],), side.cuts, rule.sizes)[0] != tensor.dims[dim]:
        return False  # the dim has cuts that do not line up with this op's factors
    side.cuts[factor] = cut
    new = dims_sharding((side.dims[dim],), side.cuts, rule.sizes)[0]
    if not tensor.is_storable(dim, new):
        return False
    names = [part.name for part in new_parts if part.name not in tensor.origins]
    tensor.set_cuts({dim: new}, {name: origins[name].through(op.name, tensor.name) for name in names})
    return True


PARAMETER_KINDS = ("parameter", "buffer")


def annotated_values(program: Program) -> list[Pin]:
    """A pin for every ``shardc.annotate`` in the model. Raises one ShardingError for all that do not fit."""
    pins: list[Pin] = []
    errors: dict[str, ShardingError] = {}
    for node in program.graph.find_nodes(op="call_function", target=ANNOTATE):
        try:
            pins.append(_annotated_value(program, node))
        except ShardingError as error:
            errors.setdefault(str(error), error)  # the gradient's error is the same
    raise_all(list(errors.values()))
    return pins


def _annotated_value(program: Program, node: fx.Node) -> Pin:
    given, shape, source = arguments(node), program.type(node).shape, program.source(node)
    place = source.module or "the model"
    who = f"module {place!r}" if given["text"] else f"annotate in {place} ({source.location})"
    try:
        spec = P.parse(given["spec"], tuple(given["priorities"]))
    except ShardingError as error:
        raise ShardingError(who, error.what, error.problem, error.remedy) from None
    assert program.mesh is not None
    sharding = spec.sharding(program.mesh, shape, who)
    opened = frozenset(dim for dim in range(len(shape)) if spec.is_open(dim))
    return Pin(node.name, "value", sharding, opened, annotation_text(program, node), tuple(given["priorities"]))


def annotation_text(program: Program, node: fx.Node) -> str:
    """The annotation of a value, as an error names it: a module's as the user wrote it, or the call in the model."""
    given = arguments(node)
    spec = P.parse(given["spec"], tuple(given["priorities"]))
    return str(given["text"]) or f"annotate({spec!r}) at {program.source(node).location}"


def pinned_values(program: Program, pins: Iterable[Pin]) -> list[Value]:
    """The value that each pin fixes."""
    nodes = {("value", node.name): node for node in program.calls} | program.named_inputs
    results = zip(program.outputs, program.results, strict=True)
    nodes |= {(output.kind, output.name): node for output, node in results if output.kind == "output" and node}
    return [program.value(nodes[pin.kind, pin.name]) for pin in pins]


class Precedence:
    """The order of pins over an axis: inputs and annotated values, then parameters, then values that yield to them.

    An annotated value yields over an axis that parameters have too, but no input has. For example, a residual that is
    cut along time by the axis of each block's weights is gathered where the weights compute. A batch that is cut at the
    embedding does not yield. Over the axes ``first``, parameters come before all others.
    """

    def __init__(self, pins: Iterable[Pin], first: frozenset[str] = frozenset()) -> None:
        self._first = first
        axes: dict[str, set[str]] = {}
        for pin in pins:
            kind = "parameter" if pin.kind in PARAMETER_KINDS else pin.kind
            axes.setdefault(kind, set()).update(pin.axes)
        self._model_axes = axes.get("parameter", set()) - axes.get("input", set())
        self._has_data = "input" in axes
        self.contested = sorted(axes.get("parameter", set()) & axes.get("input", set()))

    def rounds(self, pin: Pin) -> list[tuple[int, int]]:
        """The priority and rank of each dim of a pin; the lowest come first."""
        cuts = enumerate(pin.sharding.dims)
        ranks = (DATA if dim in pin.open and cut == WHOLE else self.of_dim(pin, dim) for dim, cut in cuts)
        return [(pin.priority(dim), rank) for dim, rank in enumerate(ranks)]

    def of_dim(self, pin: Pin, dim: int) -> int:
        """The rank of one dim of a pin, for all axes that cut it."""
        names = {part.name for part in pin.sharding.dims[dim].all_axes}
        if pin.kind in PARAMETER_KINDS:
            return PARAMETER_FIRST if self._first & names else PARAMETER
        is_shared = pin.kind == "value" and bool(self._model_axes & names)
        return YIELDING if is_shared and (self._has_data or dim) else DATA
