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

from torch import fx

from shardc.language.cut import dims_sharding, extends, factor_cuts
from shardc.language.errors import ShardingError, raise_all
from shardc.language.mesh import MICROBATCH, Axes, Mesh
from shardc.language.partition import P
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, num_shards
from shardc.language.size import plain
from shardc.ops.contraction import dot
from shardc.program.node import arguments, is_annotation, is_getitem
from shardc.program.program import Pin, Program, Value, ends_of
from shardc.program.provenance import DATA, PARAMETER, PARAMETER_FIRST, YIELDING, Origin


def propagated(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """A copy of the program after ``propagate``."""
    return propagate(program.copy(), first)


def propagate(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """The program with a sharding on every value. For the axes named in ``first``, parameters come before inputs."""
    program = program.edited("annotated")
    pins = tuple(dict.fromkeys((*program.pins, *annotated_values(program))))
    tensors = _tensors(program)
    worklist, precedence = _Worklist([*_ops(program), *_ties(program)]), Precedence(pins, first)
    pinned = [(tensors[pinned_value(program, pin)], pin, precedence.rounds(pin)) for pin in pins]
    for tensor, pin, _ in pinned:
        tensor.reserved = pin.sharding.cut_axes
    for now in sorted({each for *_, rounds in pinned for each in rounds}):
        for tensor, pin, rounds in pinned:
            tensor.closed = frozenset(dim for dim, each in enumerate(rounds) if not _is_open(pin, dim, each, now))
            if now in rounds:
                _cut_as_pinned(program, tensor, pin, [dim for dim, each in enumerate(rounds) if each == now], now[1])
                worklist.add_around(tensor.value)
        _settle(worklist, tensors)
    _write(program, tensors)
    program.pins = pins
    return program


def spread(program: Program, moved: Mapping[Value, tuple[Sharding, Mapping[str, Origin]]]) -> None:
    """Cut some values of an annotated program otherwise, where they are open, and let new cuts flow to whole dims."""
    tensors = _tensors(program)
    for (node, index), tensor in tensors.items():
        sharding = program.shardings(node)[index]
        assert sharding is not None
        for dim, cut in enumerate(sharding.dims):
            tensor.set_cut(dim, cut)
        tensor.origins.update(program.origins(node)[index])
    for pin in program.pins:
        tensor = tensors[pinned_value(program, pin)]
        tensor.closed = frozenset(range(len(tensor.shape))) - pin.open
    worklist = _Worklist([*_ops(program), *_ties(program)])
    for value, (sharding, origins) in moved.items():
        tensor = tensors[value]
        changed = {dim for dim, cut in enumerate(sharding.dims) if cut != tensor.dims[dim]}
        if tensor.closed.isdisjoint(changed):
            for dim in changed:
                tensor.set_cut(dim, sharding.dims[dim])
            tensor.origins.update(origins)
            worklist.add_around(value)
    _settle(worklist, tensors)
    _write(program, tensors)


def _settle(worklist: _Worklist, tensors: Mapping[Value, _Tensor]) -> None:
    """Take steps until no op has one left; contractions come last."""
    for with_contractions in (False, True):
        for op in worklist.drain(with_contractions):
            for value in _step(op, tensors):
                worklist.add_around(value)


def _write(program: Program, tensors: Mapping[Value, _Tensor]) -> None:
    """Give the nodes the shardings and origins that their values have by now."""
    assert program.mesh is not None
    sharding_of = functools.cache(functools.partial(Sharding, program.mesh))  # equal shardings are one object
    for node in program.graph.nodes:
        own = [tensors.get((node, index)) for index in range(len(program.types(node)))]
        shardings = tuple(sharding_of(tuple(tensor.dims)) if tensor else None for tensor in own)
        if any(shardings) or (own and program.has_many(node)):
            program.set_sharding(node, shardings if program.has_many(node) else shardings[0])
            program.set_origins(node, tuple(tensor.origins if tensor else {} for tensor in own))


@dataclass(slots=True)
class _Tensor:
    """A value while cuts flow: how each dim is cut by now, and where each axis came from.

    ``closed``: dims that the user fixed. ``reserved``: axes that are kept for those. ``mesh``: of a parameter or a
    buffer alone, which is cut only so that a DTensor on it can hold the shards. ``local_numel``: elements on one rank.
    """

    value: Value
    shape: tuple[int, ...]
    mesh: Mesh | None
    dims: list[DimSharding]
    local_numel: int
    closed: frozenset[int] = frozenset()
    reserved: Axes = ()
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, int]:
        """The value as origins name it."""
        return self.value[0].name, self.value[1]

    def set_cut(self, dim: int, cut: DimSharding) -> None:
        """Cut a dim."""
        self.dims[dim] = cut
        sizes = (cut.local_size(size) for cut, size in zip(self.dims, self.shape, strict=True))
        self.local_numel = plain(math.prod(sizes))

    def free_part(self, cut: DimSharding, before: DimSharding) -> DimSharding:
        """The leading axes of a cut that are in ``before`` already, or that cut nothing of the value yet."""
        used = [*self.reserved, *(part for dim in self.dims for part in dim.all_axes)]
        free = [part in before.all_axes or not any(part.overlaps(other) for other in used) for part in cut.all_axes]
        if all(free):
            return cut
        return before if cut.minor else DimSharding(cut.axes[: free.index(False)])

    def is_storable(self, dim: int, cut: DimSharding) -> bool:
        """Whether the value may be stored so: by whole axes, and cut unevenly only as torch would."""
        if self.mesh is None:
            return True
        if not all(self.mesh.is_whole(part) and part.name != MICROBATCH for part in cut.all_axes):
            return False
        sharding = Sharding(self.mesh, (cut,))
        return sharding.storable((self.shape[dim],)) == sharding


def _tensors(program: Program) -> dict[Value, _Tensor]:
    """One for each value of the program, uncut."""
    meshes = {node: program.mesh for (kind, _), node in program.named_inputs.items() if kind in PARAMETER_KINDS}
    return {
        (node, i): _Tensor((node, i), type_.shape, meshes.get(node), [WHOLE] * len(type_.shape), plain(type_.numel))
        for node in program.graph.nodes
        if node.op != "output" and not is_getitem(node)
        for i, type_ in enumerate(program.types(node))
        if type_ is not None
    }


def _is_open(pin: Pin, dim: int, own: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether propagation may cut a dim of a pinned value in a round: once the pin's own cut of it is there."""
    return dim in pin.open and (own <= now if pin.sharding.dims[dim] != WHOLE else own[0] <= now[0])


def _cut_as_pinned(program: Program, tensor: _Tensor, pin: Pin, dims: Iterable[int], rank: int) -> None:
    """Apply a pin to some dims; chains of origins begin here."""
    pipeline = program.options.pipeline
    for dim in dims:
        cut = pin.sharding.dims[dim]
        if cut != WHOLE:
            tensor.set_cut(dim, cut)
        for part in cut.all_axes:
            text = pipeline.text if pipeline and part.name == MICROBATCH else pin.text
            tensor.origins[part.name] = Origin(text, rank, tensor.name)


@dataclass(frozen=True, slots=True)
class Op:
    """A rule over values: an op of the graph, or a tie. ``values``, and their ``dims``: operands, then results."""

    name: str
    rule: Rule
    values: tuple[Value | None, ...]
    dims: tuple[Dims | None, ...]
    is_contraction: bool = False


class _Worklist:
    """Ops that have a step to take, in program order."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._around: dict[Value, list[int]] = {}  # which ops read or make a value
        self._queue: list[int] = []
        self._waiting: list[int] = []  # contractions
        for index, op in enumerate(ops):
            for value in dict.fromkeys(filter(None, op.values)):
                self._around.setdefault(value, []).append(index)

    def add_around(self, value: Value) -> None:
        """Queue the ops that read or make a value."""
        for index in self._around.get(value, ()):
            heapq.heappush(self._queue, index)

    def drain(self, with_contractions: bool) -> Iterator[Op]:
        """The queued ops, those that are added meanwhile included; contractions wait until ``with_contractions``."""
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


def _ops(program: Program) -> Iterator[Op]:
    """The ops of the graph."""
    for node in program.calls:
        rule = program.rule(node)
        results = tuple(None if type_ is None else (node, i) for i, type_ in enumerate(program.types(node)))
        values = program.operand_values(node) + results
        yield Op(node.name, rule, values, rule.operands + rule.results, node.target is dot)


def _ties(program: Program) -> Iterator[Op]:
    """Gradients and new buffer values are cut as their inputs are; a tangent as its output."""
    inputs = program.named_inputs
    for output, owner, node in ends_of(program):
        partner = inputs.get(("tangent", output.name)) if output.kind == "output" else owner
        if node is not None and partner is not None:
            values = program.value(node), program.value(partner)
            sizes = {f"d{i}": size for i, size in enumerate(program.value_type(values[0]).shape)}
            dims = tuple((factor,) for factor in sizes)
            yield Op(f"the {output.kind} {output.name}", Rule((dims,), (dims,), sizes), values, (dims, dims))


@dataclass(slots=True)
class _Side:
    """A tensor of one op: its factors dim by dim, and how each factor is cut there by now."""

    tensor: _Tensor
    dims: Dims
    cuts: dict[str, DimSharding]


def _step(op: Op, tensors: Mapping[Value, _Tensor]) -> list[Value]:
    """Bring the tensors of an op to common cuts; the values that changed.

    Where none can change by the op's rule, that is noted with the rule: like ops have one.
    """
    key = _step, tuple([None if value is None else tuple(tensors[value].dims) for value in op.values])
    if key in op.rule.known:
        return []
    sides = [
        _Side(tensors[value], dims, factor_cuts(dims, tensors[value].dims, tensors[value].shape, op.rule.sizes))
        for value, dims in zip(op.values, op.dims, strict=True)
        if value is not None and dims is not None
    ]
    numel: dict[str, int] = {}  # by factor: local elements of the largest tensor in which it is cut
    for side in sides:
        for factor in side.cuts:
            numel[factor] = max(numel.get(factor, 0), side.tensor.local_numel)
    changed, is_settled = list[Value](), True
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
                    changed.append(side.tensor.value)
    if is_settled:
        op.rule.known[key] = True
    return changed


def _common(longest: DimSharding, cuts: list[DimSharding]) -> DimSharding:
    """The longest cut, where it extends all others; else the leading axes that all have."""
    if all(extends(longest, cut) for cut in cuts):
        return longest
    count = 0
    while not any(cut.minor for cut in cuts) and len({cut.axes[: count + 1] for cut in cuts}) == 1:
        count += 1
    return DimSharding(longest.axes[:count])


def _extend(op: Op, side: _Side, factor: str, cut: DimSharding, origins: Mapping[str, Origin]) -> bool:
    """Cut a factor of a tensor further, where its dim is open, by the leading axes that are free there."""
    tensor, rule = side.tensor, op.rule
    dim = next(i for i, factors in enumerate(side.dims) if factor in factors)
    before = side.cuts.get(factor, WHOLE)
    cut = tensor.free_part(cut, before)
    new_parts = [part for part in cut.all_axes if part not in before.all_axes]
    is_closed = dim in tensor.closed and any(part.name != MICROBATCH for part in new_parts)
    if is_closed or not new_parts or not rule.may_pass(factor, cut):
        return False
    if factor in rule.chunks and num_shards(cut.axes) > tensor.shape[dim]:
        return False  # a dim of few elements would be chunks of one, most of them empty
    if dims_sharding((side.dims[dim],), side.cuts, rule.sizes)[0] != tensor.dims[dim]:
        return False  # the dim has cuts that do not line up with this op's factors
    side.cuts[factor] = cut
    new = dims_sharding((side.dims[dim],), side.cuts, rule.sizes)[0]
    if not tensor.is_storable(dim, new):
        return False
    tensor.set_cut(dim, new)
    for part in new_parts:
        tensor.origins.setdefault(part.name, origins[part.name].through(op.name, tensor.name))
    return True


PARAMETER_KINDS = ("parameter", "buffer")


def annotated_values(program: Program) -> list[Pin]:
    """A pin for every ``shardc.annotate`` in the model. Those that do not fit raise one ShardingError."""
    pins: list[Pin] = []
    errors: dict[str, ShardingError] = {}
    for node in program.calls:
        if is_annotation(node):
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
    """The annotation that an annotated value has: of a module as the user wrote it, or a call in the model."""
    given = arguments(node)
    spec = P.parse(given["spec"], tuple(given["priorities"]))
    return str(given["text"]) or f"annotate({spec!r}) at {program.source(node).location}"


def pinned_value(program: Program, pin: Pin) -> Value:
    """The value that a pin fixes."""
    if pin.kind == "value":
        return next((node, 0) for node in program.calls if node.name == pin.name)
    if pin.kind != "output":
        return program.value(program.named_inputs[pin.kind, pin.name])
    names = [output.name if output.kind == "output" else None for output in program.outputs]
    result = program.results[names.index(pin.name)]
    assert result is not None, pin
    return program.value(result)


class Precedence:
    """Which pin comes first over an axis: inputs and annotated values, then parameters, then values that yield to them.

    An annotated value yields over an axis that only parameters have beside it, and no input: a residual that is cut
    along time by the axis that cuts the weights of each block is gathered where these compute. A batch that is cut
    where it is embedded does not yield. Over the axes ``first`` parameters come before all.
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
