"""Why a collective is there: what its value has, what whoever reads it wants, and whose doing that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.bucket import bucket, members, results
from shardc.cause import Cause, Edges, Moved, Place, Stored
from shardc.collective import COLLECTIVES, Collective
from shardc.explain_chain import Chains
from shardc.explain_stage import StageExplainer
from shardc.explanation import Chain, End, Explanation, Reason, Sent
from shardc.fact import Origin
from shardc.mesh import axis_of
from shardc.node import is_cast, is_getitem, is_view, operands
from shardc.program import Program
from shardc.stage_traffic import sender
from shardc.step_time import collective_seconds
from shardc.text import type_text


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
        if found.kind == "collective_permute" and isinstance(cause, Moved):
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
        known = dict(cause.came) if isinstance(cause, Moved) else dict(self.program.origin(moved))
        wanted = {need.axis: need.by for need in cause.needs if need.by} if isinstance(cause, Moved) else {}
        for axis in axes:
            if axis in known:
                yield self.chains.chain(axis, known[axis], moved)
            yield from self._added(cause, axis, known)
            if axis in wanted and wanted[axis] != known.get(axis):
                yield self.chains.chain(axis, wanted[axis])
            elif isinstance(cause, Moved) and cause.stored and axis in _stored_axes(cause.stored):
                yield self.chains.chain(axis, self.program.origin(made)[axis], made)

    def _added(self, cause: Cause, axis: str, known: Mapping[str, Origin]) -> Iterator[Chain]:
        """Of a sum of several values, where the axis came from to the others, if that is elsewhere."""
        first = known.get(axis)
        found = {} if first is None else {each.annotation: each for each in first.others}
        for other in cause.added if isinstance(cause, Moved) else ():
            origin = other.came.get(axis)
            for each in () if origin is None else (origin, *origin.others):
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
        if isinstance(cause, Moved):
            node = self.chains.nodes.get(cause.user.name)
            taken = operands(node) if node is not None and node.op == "call_function" else ()
            given = taken.index(made) if made in taken else cause.operand
            return self._end(cause.user, cause.wants.text(cause.type), given)
        readers = list(_readers(made, isinstance(cause, Edges)))
        reader = next((each for each in readers if self._is_run(each, found.stage)), next(iter(readers), made))
        source = self.program.source(reader)
        place = Place(reader.name, source.module, source.location)
        return self._end(place, type_text(self.program, made), None)

    def _is_run(self, node: fx.Node, stage: int | None) -> bool:
        return self.stages is None or any(run["stage"] == stage for run in self.stages.record.runs.get(node, ()))

    def _end(self, place: Place, type_: str, operand: int | None) -> End:
        node = self.chains.nodes.get(place.name)
        return End(place.name, type_, self.chains.op(node) if node else "", operand, place.module, place.location)

    def _reasons(self, cause: Cause, axes: list[str]) -> Iterator[Reason]:
        if isinstance(cause, Moved):
            yield from (Reason(need.axis, need.kind, need.dim, need.end) for need in cause.needs if need.axis in axes)
        stored = cause.stored if isinstance(cause, Moved) else cause if isinstance(cause, Stored) else None
        if stored is not None:
            yield from (Reason(axis, "stored", end=stored.option) for axis in axes if axis in _stored_axes(stored))
        elif not isinstance(cause, Moved):
            yield from (Reason(axis, "edges") for axis in axes)


def _stored_axes(stored: Stored) -> set[str]:
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
