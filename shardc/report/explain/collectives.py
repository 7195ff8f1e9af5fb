"""Explain a collective: the value that it moves, the shardings of its operand and for its reader, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from shardc.costs.count import collective_seconds
from shardc.language.machine import SentKind
from shardc.language.mesh import axis_of
from shardc.ops.attention.rules import RINGS
from shardc.ops.contraction import dots_scatter, gather_dots
from shardc.passes.decompose.share_heads import BY_HEADS, BY_POSITIONS
from shardc.program.collective import COLLECTIVES, EXCHANGES, Collective, saved_slice
from shardc.program.communication import (
    axes_of,
    bucket,
    collective_at,
    goes_round,
    is_collective,
    members,
    results,
    values_received,
    values_sent,
)
from shardc.program.node import is_cast, is_getitem, is_view, op_name, operand, operands
from shardc.program.program import Program
from shardc.program.provenance import (
    Cause,
    Endpoint,
    NeighbourEdges,
    RoundOfKeys,
    SavedCut,
    ShardingChange,
    StorageChange,
)
from shardc.program.stages import sender
from shardc.program.text import type_text
from shardc.report.explain.chains import Chains
from shardc.report.explain.explanation import Chain, Explanation, Reason, ReasonKind, Side, Transmission
from shardc.report.explain.stages import StageExplainer


@dataclass(frozen=True, slots=True)
class CollectiveExplainer:
    """Explains the collectives of one program, from the causes that passes recorded at their nodes.

    ``stages`` explains the messages between the stages of a pipeline.
    """

    program: Program
    chains: Chains
    stages: StageExplainer | None = None

    def explain(self, collective: Collective) -> Explanation:
        """Explain why a collective is there; for a bucket, why each of its members is."""
        c = collective
        seconds = collective_seconds(self.program, c)
        kind: SentKind = c.kind  # type: ignore[assignment]  # no local kind is a collective
        sent = Transmission(kind, c.axes, c.phase, c.bytes, c.wire_bytes, seconds, c.stage, c.times, c.codec or None)
        if self.stages is not None and self.node(c) is None:
            return self.stages.message(c, sent)
        parts = self.members(c)
        if len(parts) == 1 and not parts[0].notes:
            return replace(parts[0], name=c.name, sent=sent)
        return Explanation(c.name, "collective", location=c.source, sent=sent, parts=parts)

    def node(self, collective: Collective) -> fx.Node | None:
        """The node that sends; None for a message between stages. Several stages may run one node."""
        return sender(self.chains.nodes, collective.name)

    def members(self, collective: Collective) -> tuple[Explanation, ...]:
        """Explain why each member of a bucket is there, or why any other collective is."""
        node = self.node(collective)
        assert node is not None, collective
        sent = goes_round(node) if node.target in RINGS else node.all_input_nodes
        moved, made = (values_sent(node), values_received(node)) if members(node) else (sent[:1], [node])
        values = zip(collective.causes, moved, made, strict=True)
        parts = tuple(self._member(collective, *each) for each in values)
        note = f"one of {len(parts)} that go together as {collective.name}"
        return tuple(replace(part, notes=(note,)) for part in parts) if len(parts) > 1 else parts

    def _member(self, collective: Collective, cause: Cause, moved: fx.Node, result: fx.Node) -> Explanation:
        """Explain why one value is sent: ``moved`` is the operand, ``result`` the node of its result."""
        axes = list(map(axis_of, collective.axes))
        if collective.kind == "collective_permute" and isinstance(cause, ShardingChange):
            axes += [need.axis for need in cause.needs]
        axes = list(dict.fromkeys(axes))
        source = self.program.source(moved if collective.name == result.name else result)
        return Explanation(
            result.name, "collective", type_text(self.program, result), source.module, source.location,
            tuple(self._chains(cause, axes, moved, result)), has=self.chains.side(moved),
            wants=self._reader(collective, cause, result), reasons=tuple(_reasons(cause, axes)),
        )  # fmt: skip

    def _chains(self, cause: Cause, axes: list[str], moved: fx.Node, result: fx.Node) -> Iterator[Chain]:
        """The chain of each axis to the value that is sent, and to what its reader needs."""
        change = cause if isinstance(cause, ShardingChange) else None
        known = dict(change.origins if change else self.program.origin(moved))
        needed = {need.axis: need.origin for need in change.needs if need.origin} if change else {}
        for axis in axes:
            if axis in known:
                yield self.chains.chain(axis, known[axis], moved)
            # the origins of the axis at the other summands of an open sum, if these are other annotations
            first = known.get(axis)
            origins = {each.annotation: each for each in first.further_annotations} if first else {}
            for origin in (other.origins.get(axis) for other in (change.added if change else ())):
                for each in (origin, *origin.further_annotations) if origin else ():
                    origins.setdefault(each.annotation, each)
            others = [each for text, each in origins.items() if not first or text != first.annotation]
            yield from (self.chains.chain(axis, each) for each in others)
            if axis in needed and needed[axis] != known.get(axis):
                yield self.chains.chain(axis, needed[axis])
            elif change and change.stored and axis in change.stored.axes:
                yield self.chains.chain(axis, self.program.origin(result)[axis], result)

    def _reader(self, collective: Collective, cause: Cause, result: fx.Node) -> Side:
        """The reader of the result and the type that it needs; for a stored parameter, the stage's first reader."""
        if isinstance(cause, ShardingChange):
            node = self.chains.nodes.get(cause.user.name)
            arguments = operands(node) if node is not None and node.op == "call_function" else ()
            index = arguments.index(result) if result in arguments else cause.operand
            return self._side(cause.user, cause.dst.text(cause.type), index)
        if isinstance(cause, RoundOfKeys):
            return self._side(cause.user, str(cause.type), None)
        readers = list(_readers(result, isinstance(cause, NeighbourEdges)))
        runs = self.stages.record.runs if self.stages is not None else {}
        in_stage = (each for each in readers if any(run.stage == collective.stage for run in runs.get(each, ())))
        reader = next(in_stage, next(iter(readers), result))
        source = self.program.source(reader)
        return self._side(Endpoint(reader.name, source.module, source.location), type_text(self.program, result), None)

    def _side(self, end: Endpoint, type_: str, operand: int | None) -> Side:
        node = self.chains.nodes.get(end.name)
        return Side(end.name, type_, self.chains.op(node) if node else "", operand, end.module, end.location)


def _reasons(cause: Cause, axes: list[str]) -> Iterator[Reason]:
    stored = cause if isinstance(cause, StorageChange) else None
    if isinstance(cause, ShardingChange) and (shared := _shared_heads(cause)):
        yield from (Reason(axis, shared, None) for axis in axes)
    elif isinstance(cause, ShardingChange):
        needs = (need for need in cause.needs if need.axis in axes)
        yield from (Reason(need.axis, need.kind, need.dim, need.annotation) for need in needs)
        stored = cause.stored
    if stored is not None:
        yield from (Reason(axis, "stored", None, stored.option) for axis in axes if axis in stored.axes)
    elif not isinstance(cause, ShardingChange):
        kind: ReasonKind = "keys" if isinstance(cause, RoundOfKeys) else "edges"
        yield from (Reason(axis, kind, None) for axis in axes)


def _shared_heads(change: ShardingChange) -> ReasonKind | None:
    """The reason if ranks share heads of attention: values are sent to them, or they send results back."""
    names: dict[str, ReasonKind] = {BY_HEADS: "heads", BY_POSITIONS: "positions"}
    return names.get(change.user.name.rstrip("_0123456789"))


def _readers(result: fx.Node, is_through_views: bool) -> Iterator[fx.Node]:
    """The readers of a collective's result, behind casts and further steps, and behind views."""
    for user in result.users:
        is_step = user.op == "call_function" and (user.target in COLLECTIVES or user.target is bucket)
        if is_step or is_getitem(user) or is_cast(user) or (is_through_views and is_view(user)):
            yield from _readers(user, is_through_views)
        else:
            yield user


def why_needed(program: Program, node: fx.Node) -> str:
    """A sentence that says why any plan like this one needs a collective of a lowered program in global shapes."""
    moved, axes = list(movements(program, node)), " and ".join(axes_of(node))
    kind, count = collective_at(program, node).kind, len(moved)
    if kind in ("all_reduce", "reduce_scatter"):
        return _why_sum(program, node, moved, axes)
    if node.target is gather_dots:
        return (
            f"the value is made cut over {axes} and read whole by products: chunks go round, each multiplied on its way"
        )
    if node.target is dots_scatter:
        return (
            f"products are sums over a dim that {axes} cuts: chunks of them go round, to which each rank adds its part"
        )
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    if all(each.producer in inputs and inputs[each.producer].kind in ("parameter", "buffer") for each in moved):
        what = f"{count} parameters are" if count > 1 else "a parameter is"
        return f"{what} stored cut over {axes} and used whole: each rank receives the parts that it lacks"
    if any(isinstance(cause, SavedCut) for cause in program.causes(node)):
        what = f"{count} values are" if count > 1 else "a value is"
        return f"{what} saved cut over {axes}, as saved= says, and read whole in backward"
    if kind == "all_to_all":
        return (
            f"the value is made cut over {axes} along one dim and read cut along another: ranks hold what others read"
        )
    if kind == "collective_permute":
        return f"along a dim that {axes} cuts, each rank reads what its neighbours hold"
    return f"the value is made cut over {axes} and read whole: each rank receives the parts that it lacks"


def _why_sum(program: Program, node: fx.Node, moved: list[Movement], axes: str) -> str:
    outputs = [program.outputs[i] for movement in moved for i in movement.outputs]
    kinds = {output.kind for output in outputs}
    if kinds == {"gradient"} and set(axes_of(node)) <= {*program.input_axes}:
        what = f"{outputs[0].name} and {len(outputs) - 1} more" if len(outputs) > 1 else outputs[0].name
        return (
            f"the gradient of {what} is a sum over the batch, of which each rank along {axes} has a part: "
            "every plan that cuts the batch adds it up once a step"
        )
    if "output" in kinds or all(not program.value_type(program.value(each.producer)).shape for each in moved):
        return f"it is a sum over what {axes} cuts, of which each rank has a part; it is a number or an output"
    return f"it is a sum over a dim that {axes} cuts, of which each rank has a part: its readers need all parts"


@dataclass(frozen=True, slots=True)
class Transfer:
    """The move of a value in a phase, along a mesh axis, by a collective of some kind."""

    phase: str
    axis: str
    value: str
    kind: str

    @property
    def of_any_kind(self) -> Transfer:
        """The same transfer, whichever kind of collective does it."""
        return replace(self, kind="")


def transfers(program: Program) -> dict[str, frozenset[Transfer]]:
    """The transfers of each collective of a lowered program in global shapes, by the collective's name."""
    by_name = {}
    for node in filter(is_collective, program.calls):
        phase, kind = program.source(node).phase, collective_at(program, node).kind
        values = [_value_text(program, movement) for movement in movements(program, node)]
        by_name[node.name] = frozenset(Transfer(phase, axis, value, kind) for value in values for axis in axes_of(node))
    return by_name


def _value_text(program: Program, movement: Movement) -> str:
    """A value by the names of the user's model."""
    outputs = [program.outputs[i] for i in movement.outputs]
    if outputs:
        return ", ".join(dict.fromkeys(f"{output.kind} {output.name}" for output in outputs))
    for input_, node in zip(program.inputs, program.placeholders, strict=True):
        if node is movement.producer:
            return f"{input_.kind} {input_.name}"
    call, index = program.value(movement.producer)
    source, type_ = program.source(movement.producer), program.value_type((call, index))
    op = op_name(call.target) + (f"[{index}]" if call is not movement.producer else "")
    return " ".join(filter(None, (source.module, source.location, op, str(type_))))


def is_removed(before: frozenset[Transfer], after: frozenset[Transfer], altogether: bool = False) -> bool:
    """Whether a collective with the transfers ``before`` is gone from a plan with those ``after``.

    ``altogether``: collectives of another kind may not move its values either.
    """
    if altogether:
        return {each.of_any_kind for each in before}.isdisjoint(each.of_any_kind for each in after)
    return before.isdisjoint(after)


def replacement_kinds(before: frozenset[Transfer], after: frozenset[Transfer]) -> tuple[str, ...]:
    """The other kinds of collectives by which a plan with the transfers ``after`` moves the same values."""
    known = {each.of_any_kind for each in before}
    return tuple(sorted({each.kind for each in after - before if each.of_any_kind in known}))


@dataclass(frozen=True, slots=True)
class Movement:
    """One value that a collective moves.

    ``producer``: the node that computes it, before every step of the reshard. ``operand``: the collective's operand.
    ``result``: the last step of the reshard. ``users``: the readers of ``result``. ``outputs``: the indices of
    ``result`` among the program's results.
    """

    producer: fx.Node
    operand: fx.Node
    result: fx.Node
    users: tuple[fx.Node, ...]
    outputs: tuple[int, ...]


def movements(program: Program, node: fx.Node) -> Iterator[Movement]:
    """The values that a collective moves: one, or those of a bucket."""
    parts = members(node)
    pairs = [(part.operand, list(results(node, part))) for part in parts] or [(operand(node), [node])]
    for moved, firsts in pairs:
        lasts = list(dict.fromkeys(last for each in firsts for last in _last_steps(program, each)))
        users = tuple(dict.fromkeys(user for last in lasts for user in last.users if not _is_step(program, user)))
        outputs = tuple(i for i, result in enumerate(program.results) if result in lasts)
        producer = producer_of(program, moved)
        yield Movement(producer, moved, (lasts or firsts or [node])[0], users, outputs)


def producer_of(program: Program, node: fx.Node) -> fx.Node:
    """The node that computes a value, before all steps of reshards, and before casts."""
    while node.op == "call_function" and (_is_step(program, node) or is_cast(node)):
        value, index = program.value(node)
        node = operand(value, 3 + index) if _is_of_bucket(node) else operand(node)
    return node


def _last_steps(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """The last steps of the reshards that a node is a step of: those with a user that is no step."""
    steps = [user for user in node.users if user.op != "output" and _is_step(program, user)]
    if len(steps) < len(node.users):
        yield node
    for step in steps:
        yield from _last_steps(program, step)


def _is_step(program: Program, node: fx.Node) -> bool:
    """Whether a node is part of a reshard: a collective, a view around one, or a result of a bucket."""
    if node.op != "call_function" or node.target in EXCHANGES:
        return False
    if node.target is saved_slice:  # its gather in backward is another reshard than forward's
        return False
    is_ours = node.target in COLLECTIVES or node.target is bucket or bool(program.causes(node))
    return is_ours or _is_of_bucket(node)


def _is_of_bucket(node: fx.Node) -> bool:
    return is_getitem(node) and operand(node).target is bucket
