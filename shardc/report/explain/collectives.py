"""Why a collective is there: what its value has, what whoever reads it wants, and whose doing that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.costs.time import collective_seconds
from shardc.language.mesh import axis_of
from shardc.language.partition import P
from shardc.program.collective import COLLECTIVES, EXCHANGES, Collective
from shardc.program.communication import axes_of, bucket, collective_at, is_collective, members, results
from shardc.program.node import is_cast, is_getitem, is_view, op_name, operand, operands
from shardc.program.program import Pin, Program, ends_of
from shardc.program.provenance import Cause, Endpoint, NeighbourEdges, Origin, ShardingChange, StorageChange
from shardc.program.stages import sender
from shardc.program.text import type_text
from shardc.report.explain.chains import Chains
from shardc.report.explain.explanation import Chain, End, Explanation, Reason, Sent
from shardc.report.explain.stages import StageExplainer


@dataclass(frozen=True, slots=True)
class CollectiveExplainer:
    """Explains what one program sends."""

    program: Program
    chains: Chains
    stages: StageExplainer | None = None

    def explain(self, found: Collective) -> Explanation:
        """Why a collective is there; of a bucket, why each of its members is."""
        seconds = collective_seconds(self.program, found)
        sent = Sent(
            found.kind, found.axes, found.phase, found.bytes, found.wire_bytes, seconds, found.stage, found.times
        )
        if self.stages is not None and self.node(found) is None:
            return self.stages.message(found, sent)
        parts = self.members(found)
        if len(parts) == 1 and not parts[0].notes:
            return replace(parts[0], name=found.name, sent=sent)
        return Explanation(found.name, "collective", location=found.source, sent=sent, parts=parts)

    def members(self, found: Collective) -> tuple[Explanation, ...]:
        """Why each member of a bucket is there; of another collective, why it is."""
        node = self.node(found)
        assert node is not None, found
        moved = [part.operand for part in members(node)] or node.all_input_nodes[:1]
        made = [next(results(node, part), node) for part in members(node)] or [node]
        parts = tuple(self._member(found, *each) for each in zip(found.causes, moved, made, strict=True))
        note = f"one of {len(parts)} that go together as {found.name}"
        return tuple(replace(part, notes=(note,)) for part in parts) if node.target is bucket else parts

    def node(self, found: Collective) -> fx.Node | None:
        """The node that sends; a message between stages has none. Of a pipeline several stages may run one node."""
        return sender(self.chains.nodes, found.name)

    def _member(self, found: Collective, cause: Cause, moved: fx.Node, made: fx.Node) -> Explanation:
        """Why a value is sent: the node that has it, and the node that has what came of it."""
        axes = list(map(axis_of, found.axes))
        if found.kind == "collective_permute" and isinstance(cause, ShardingChange):
            axes += [need.axis for need in cause.needs]
        axes = list(dict.fromkeys(axes))
        source = self.program.source(moved if found.name == made.name else made)
        return Explanation(
            made.name, "collective", type_text(self.program, made), source.module, source.location,
            tuple(self._chains(cause, axes, moved, made)), has=self._has(moved), wants=self._wants(found, cause, made),
            reasons=tuple(self._reasons(cause, axes)),
        )  # fmt: skip

    def _chains(self, cause: Cause, axes: list[str], moved: fx.Node, made: fx.Node) -> Iterator[Chain]:
        """Where each axis came from, to the value that is sent and to what whoever reads it wants."""
        known = dict(cause.origins) if isinstance(cause, ShardingChange) else dict(self.program.origin(moved))
        wanted = (
            {need.axis: need.origin for need in cause.needs if need.origin} if isinstance(cause, ShardingChange) else {}
        )
        for axis in axes:
            if axis in known:
                yield self.chains.chain(axis, known[axis], moved)
            yield from self._added(cause, axis, known)
            if axis in wanted and wanted[axis] != known.get(axis):
                yield self.chains.chain(axis, wanted[axis])
            elif isinstance(cause, ShardingChange) and cause.stored and axis in _stored_axes(cause.stored):
                yield self.chains.chain(axis, self.program.origin(made)[axis], made)

    def _added(self, cause: Cause, axis: str, known: Mapping[str, Origin]) -> Iterator[Chain]:
        """Of a sum of several values, where the axis came from to the others, if that is elsewhere."""
        first = known.get(axis)
        found = {} if first is None else {each.annotation: each for each in first.further_annotations}
        for other in cause.added if isinstance(cause, ShardingChange) else ():
            origin = other.origins.get(axis)
            for each in () if origin is None else (origin, *origin.further_annotations):
                found.setdefault(each.annotation, each)
        yield from (
            self.chains.chain(axis, each) for said, each in found.items() if not first or said != first.annotation
        )

    def _has(self, moved: fx.Node) -> End:
        source = self.program.source(moved)
        name, op = self.chains.names[moved], self.chains.op(moved)
        return End(name, type_text(self.program, moved), op, None, source.module, source.location)

    def _wants(self, found: Collective, cause: Cause, made: fx.Node) -> End:
        """Who reads what is made, and what it takes: of a stored parameter the first that does, in its stage."""
        if isinstance(cause, ShardingChange):
            node = self.chains.nodes.get(cause.user.name)
            taken = operands(node) if node is not None and node.op == "call_function" else ()
            given = taken.index(made) if made in taken else cause.operand
            return self._end(cause.user, cause.dst.text(cause.type), given)
        readers = list(_readers(made, isinstance(cause, NeighbourEdges)))
        reader = next((each for each in readers if self._is_run(each, found.stage)), next(iter(readers), made))
        source = self.program.source(reader)
        place = Endpoint(reader.name, source.module, source.location)
        return self._end(place, type_text(self.program, made), None)

    def _is_run(self, node: fx.Node, stage: int | None) -> bool:
        return self.stages is None or any(run["stage"] == stage for run in self.stages.record.runs.get(node, ()))

    def _end(self, place: Endpoint, type_: str, operand: int | None) -> End:
        node = self.chains.nodes.get(place.name)
        return End(place.name, type_, self.chains.op(node) if node else "", operand, place.module, place.location)

    def _reasons(self, cause: Cause, axes: list[str]) -> Iterator[Reason]:
        if isinstance(cause, ShardingChange):
            yield from (
                Reason(need.axis, need.kind, need.dim, need.annotation) for need in cause.needs if need.axis in axes
            )
        stored = (
            cause.stored if isinstance(cause, ShardingChange) else cause if isinstance(cause, StorageChange) else None
        )
        if stored is not None:
            yield from (Reason(axis, "stored", end=stored.option) for axis in axes if axis in _stored_axes(stored))
        elif not isinstance(cause, ShardingChange):
            yield from (Reason(axis, "edges") for axis in axes)


def _stored_axes(stored: StorageChange) -> set[str]:
    """The axes that cut a parameter between uses alone."""
    return {part.name for part in stored.stored.cut_axes} - {part.name for part in stored.computed.cut_axes}


def _readers(made: fx.Node, is_view_passed: bool) -> Iterator[fx.Node]:
    """Who reads what a collective makes, behind casts and further steps, and behind views."""
    for user in made.users:
        is_step = user.op == "call_function" and (user.target in COLLECTIVES or user.target is bucket)
        if is_step or is_getitem(user) or is_cast(user) or (is_view_passed and is_view(user)):
            yield from _readers(user, is_view_passed)
        else:
            yield user


@dataclass(frozen=True, slots=True)
class Named:
    """A value that an annotation may be about: ``kind`` and name as in a Pin, and its global shape."""

    kind: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """Of a collective: the mesh axes that it goes over, and the annotated patterns that it may hang on.

    ``distances``: 0 for one about a value that it moves, or that stands beside one; 1 for one that its cuts come from;
    2 for others that name one of its axes, and for inputs; 3 for all else. ``near``: values beside it that no pattern
    is about. ``ranks``: of each pattern how many dims its values have. ``calls``: of ``shardc.annotate`` in the model
    that name one of its axes, or that it is moved for.
    """

    axes: tuple[str, ...]
    distances: Mapping[str, int]
    near: tuple[Named, ...]
    ranks: Mapping[str, int]
    calls: tuple[str, ...] = ()


def site_of(program: Program, node: fx.Node, annotations: Mapping[str, P]) -> Site:
    """The site of a collective of a lowered program in global shapes."""
    axes, moved = axes_of(node), list(movements(program, node))
    said = {f"{pattern}: {spec!r}": pattern for pattern, spec in annotations.items()}
    beside = dict.fromkeys(value for movement in moved for value in _beside(program, movement))
    pinned = {(pin.kind, pin.name): pin.text for pin in program.pins}
    needs = [need for cause in program.causes(node) if isinstance(cause, ShardingChange) for need in cause.needs]
    direct = {said.get(pinned.get((value.kind, value.name), "")) for value in beside}
    direct |= {said.get(need.annotation) for need in needs if need.kind in ("placed", "end")}
    origins = {*(need.annotation for need in needs), *_origins(program, node, moved, axes)}
    came = {said.get(text) for text in origins}
    inputs = {said.get(pin.text) for pin in program.pins if pin.kind == "input"}

    def distance(pattern: str, spec: P) -> int:
        if pattern in direct:
            return 0
        if pattern in came:
            return 1
        return 2 if pattern in inputs or axis_names(spec) & set(axes) else 3

    distances = {pattern: distance(pattern, spec) for pattern, spec in annotations.items()}
    near = tuple(value for value in beside if (value.kind, value.name) not in pinned and value.kind != "output")
    in_model = [pin for pin in program.pins if pin.kind == "value" and pin.text not in said]
    calls = [pin.text for pin in in_model if pin.text in origins or set(axes) & set(_cut_by(pin))]
    return Site(axes, distances, near, _ranks(program, said), tuple(dict.fromkeys(calls)))


def _cut_by(pin: Pin) -> Iterator[str]:
    yield from (part.name for part in pin.sharding.cut_axes)


def axis_names(spec: P) -> set[str]:
    """The mesh axes that a P names."""
    return set[str]().union(*map(entry_axes, spec.entries))


def entry_axes(entry: object) -> set[str]:
    """Those of one entry, an axis for each part of one."""
    named = getattr(entry, "axes", entry)
    names = (named,) if isinstance(named, str) else named if isinstance(named, tuple) else ()
    return set(map(axis_of, names))


def _ranks(program: Program, said: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pin in program.pins:
        if pin.text in said:
            rank = len(pin.sharding.dims)
            found[said[pin.text]] = min(rank, found.get(said[pin.text], rank))
    return found


def _origins(program: Program, node: fx.Node, moved: list[Movement], axes: tuple[str, ...]) -> Iterator[str]:
    """The annotations that the axes came from: to what is moved, and to what reads it."""
    seen = [node, *(each for movement in moved for each in (movement.made, movement.come, *movement.users))]
    for each in seen:
        if each.op != "output":
            for origins in program.origins(program.value(each)[0]):
                yield from (origin.annotation for axis, origin in origins.items() if axis in axes)


def _beside(program: Program, movement: Movement) -> Iterator[Named]:
    """What is moved, what it is the gradient of, and the parameters and inputs that its maker and readers take."""
    given = dict(zip(program.placeholders, program.inputs, strict=True))
    ends = list(ends_of(program))
    for output, owner, _ in (ends[i] for i in movement.ends):
        if owner is not None:
            yield Named(given[owner].kind, given[owner].name, given[owner].type.shape)
        elif output.kind == "output":
            yield Named("output", output.name, program.value_type(program.value(movement.come)).shape)
    calls = [movement.made, *(user for user in movement.users if user.op != "output")]
    for call in calls:
        for taken in [call, *filter(None, operands(program.value(call)[0]))]:
            put = given.get(_stored(program, taken))
            if put is not None and put.kind in ("parameter", "buffer", "input"):
                yield Named(put.kind, put.name, put.type.shape)


def _stored(program: Program, node: fx.Node) -> fx.Node:
    """The input that a value is a view or a cast of, however it was resharded; else where that ends."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        is_same = is_view(node) or is_cast(node) or is_getitem(node) or bool(program.causes(node))
        if not is_same:
            break
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True, slots=True)
class Transfer:
    """That of a value, in a phase, along a mesh axis, by a collective of a kind."""

    phase: str
    axis: str
    value: str
    kind: str

    @property
    def of_any_kind(self) -> Transfer:
        """The same, whichever kind of collective does it."""
        return replace(self, kind="")


def is_removed(moved: frozenset[Transfer], left: frozenset[Transfer], altogether: bool = False) -> bool:
    """Whether a collective of the transfers ``moved`` is gone from a plan that has those ``left``."""
    if altogether:
        return {each.of_any_kind for each in moved}.isdisjoint(each.of_any_kind for each in left)
    return moved.isdisjoint(left)


@dataclass(frozen=True, slots=True)
class Movement:
    """One value that a collective moves.

    ``made``: the node that made it. ``moved``: what the collective takes. ``come``: the last of the steps by which it
    comes to how it is wanted. ``users``: who wants it so; ``ends``: the indices of the program's results among them.
    """

    made: fx.Node
    moved: fx.Node
    come: fx.Node
    users: tuple[fx.Node, ...]
    ends: tuple[int, ...]


def instead(moved: frozenset[Transfer], left: frozenset[Transfer]) -> tuple[str, ...]:
    """The kinds of collectives by which a plan that has the transfers ``left`` moves what was moved by another kind."""
    known = {each.of_any_kind for each in moved}
    return tuple(sorted({each.kind for each in left - moved if each.of_any_kind in known}))


def transfers(program: Program) -> dict[str, frozenset[Transfer]]:
    """Those of each collective of a lowered program in global shapes, by the collective's name."""
    return {node.name: frozenset(transfers_of(program, node)) for node in program.calls if is_collective(node)}


def transfers_of(program: Program, node: fx.Node) -> Iterator[Transfer]:
    """The transfers of one collective."""
    phase, kind = program.source(node).phase, collective_at(program, node).kind
    for movement in movements(program, node):
        value = value_text(program, movement)
        yield from (Transfer(phase, axis, value, kind) for axis in axes_of(node))


def movements(program: Program, node: fx.Node) -> Iterator[Movement]:
    """What a collective moves: one value, or those of a bucket."""
    parts = members(node)
    pairs = [(part.operand, list(results(node, part))) for part in parts] or [(operand(node), [node])]
    for moved, made in pairs:
        lasts = list(dict.fromkeys(last for each in made for last in _lasts(program, each)))
        users = tuple(dict.fromkeys(user for last in lasts for user in last.users if not _is_step(program, user)))
        ends = tuple(i for i, result in enumerate(program.results) if result in lasts)
        yield Movement(_maker(program, moved), moved, (lasts or made or [node])[0], users, ends)


def value_text(program: Program, movement: Movement) -> str:
    """A value by the names of the user's model."""
    ends = [program.outputs[i] for i in movement.ends]
    if ends:
        return ", ".join(dict.fromkeys(f"{end.kind} {end.name}" for end in ends))
    made = movement.made
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if node is made:
            return f"{given.kind} {given.name}"
    source, type_ = program.source(made), program.value_type(program.value(made))
    producer, index = program.value(made)
    op = op_name(producer.target) + (f"[{index}]" if producer is not made else "")
    return " ".join(filter(None, (source.module, source.location, op, str(type_))))


def _maker(program: Program, node: fx.Node) -> fx.Node:
    """The node behind the steps of a reshard and casts."""
    while node.op == "call_function" and (_is_step(program, node) or is_cast(node)):
        node = operand(program.value(node)[0], 3 + program.value(node)[1]) if _is_bucketed(node) else operand(node)
    return node


def _lasts(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """The last steps of the reshards that a node is a step of: those that have other users."""
    steps = [user for user in node.users if user.op != "output" and _is_step(program, user)]
    if len(steps) < len(node.users):
        yield node
    for step in steps:
        yield from _lasts(program, step)


def _is_step(program: Program, node: fx.Node) -> bool:
    """Whether a node is part of a reshard: a collective, a view around one, or a value picked of a bucket."""
    if node.op != "call_function" or node.target in EXCHANGES:
        return False
    is_ours = node.target in COLLECTIVES or node.target is bucket or bool(program.causes(node))
    return is_ours or _is_bucketed(node)


def _is_bucketed(node: fx.Node) -> bool:
    return is_getitem(node) and operand(node).target is bucket


def why_needed(program: Program, node: fx.Node) -> str:
    """One sentence of a collective of a lowered program in global shapes."""
    moved, axes = list(movements(program, node)), " and ".join(axes_of(node))
    kind, count = collective_at(program, node).kind, len(moved)
    ends: set[str] = {program.outputs[i].kind for movement in moved for i in movement.ends}
    if kind in ("all_reduce", "reduce_scatter"):
        return _of_sum(program, node, moved, axes, ends)
    if all(_is_parameter(program, movement) for movement in moved):
        what = (
            f"{count} parameters lie cut over {axes} and are"
            if count > 1
            else f"a parameter lies cut over {axes} and is"
        )
        return f"{what} computed with whole: a rank is sent what it lacks"
    if kind == "all_to_all":
        return (
            f"the value is made cut over {axes} along one dim and read cut along another: ranks hold what others read"
        )
    if kind == "collective_permute":
        return f"along a dim that {axes} cuts, each rank reads what its neighbours hold"
    return f"the value is made cut over {axes} and read whole: a rank is sent what it lacks"


def _of_sum(program: Program, node: fx.Node, moved: list[Movement], axes: str, ends: set[str]) -> str:
    inputs = {part.name for pin in program.pins if pin.kind == "input" for part in pin.sharding.cut_axes}
    if ends == {"gradient"} and set(axes_of(node)) <= inputs:
        names = [program.outputs[i].name for movement in moved for i in movement.ends]
        what = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        return (
            f"the gradient of {what} is a sum over the batch, of which each rank along {axes} has a part: "
            "every plan that cuts the batch adds it up once a step"
        )
    if "output" in ends or all(not program.value_type(program.value(each.made)).shape for each in moved):
        return f"it is a sum over what {axes} cuts, of which each rank has a part; it is but a number or an output"
    return f"it is a sum over a dim that {axes} cuts, of which each rank has a part: whoever reads it needs all parts"


def _is_parameter(program: Program, movement: Movement) -> bool:
    kinds = dict(zip(program.placeholders, (put.kind for put in program.inputs), strict=True))
    return kinds.get(movement.made) in ("parameter", "buffer")
