"""The predicted timeline of a step: every call and collective of one rank, or of all ranks of a pipeline.

A rank computes in the order of the program. A collective starts where it stands in the program and overlaps with the
computation after it; its first reader waits for it. Collectives over the same axes run one after another. The rank
itself copies operands before they are sent, and results before their first reader, where that is necessary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from torch import fx

from shardc.costs.copies import copy_seconds
from shardc.costs.count import (
    call_seconds,
    chunk_seconds,
    collective_seconds,
    link_of,
    nbytes,
    on_machine,
    seconds,
    stage_link,
    update_seconds,
    work_of,
)
from shardc.costs.stages.lifetime import ways_after
from shardc.costs.stages.record import StageRecord
from shardc.language.machine import HierarchicalLink, Link
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_part
from shardc.language.text import bytes_text, seconds_text
from shardc.language.words import Part
from shardc.ops.contraction import dots_scatter
from shardc.ops.tier import TRANSFERS, fetch, offload
from shardc.program.collective import GO_ROUND, Collective
from shardc.program.communication import collective_at, is_collective
from shardc.program.lifetime import split
from shardc.program.node import is_getitem, op_name
from shardc.program.program import Program
from shardc.program.provenance import Phase
from shardc.program.stages import Crossing, has_stages
from shardc.program.text import range_name
from shardc.program.traffic import collectives_of
from shardc.schedules.clock import Task
from shardc.schedules.timeline import Timeline, timeline
from shardc.schedules.trace import Sent

COMPUTING, OPTIMIZER, OVER = "computing", "optimizer step", "collectives over "  # lanes
COPYING: dict[Any, str] = {fetch: "fetched", offload: "offloaded"}  # lanes of copies from the tier below, and to it
OPERANDS_COPIED, RESULTS_COPIED = " (operands copied)", " (results copied)"  # after the name of a collective
BY = " by "  # in the name of a lane, between its axes and a link that crosses nodes
BEFORE_SCHEDULE: tuple[Part, ...] = ("once", "count", "settle")


def step_timeline(program: Program) -> Timeline:
    """One step of a lowered program or a later one, with the optimizer's step if there are gradients.

    Its ``makespan`` is the predicted time in seconds on the machine that the program was compiled for. Lanes are those
    of one rank; of a pipeline, all its ranks and their channels.
    """
    if not has_stages(program):
        return timeline(tuple(_Lanes(program).tasks()), [COMPUTING])
    record = StageRecord(program)
    scheduled = record.timeline
    return timeline((*_begin(record), *scheduled.tasks, *_end(record, scheduled)), scheduled.ranks)


def axes_and_link(lane: Hashable) -> tuple[str, str]:
    """The axes of a lane of collectives, and its link if that crosses nodes."""
    axes, _, link = str(lane).removeprefix(OVER).partition(BY)
    return axes, link


# One rank.


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """The name of a task on a lane of one rank: a call or a collective. It is equal to no other.

    ``name``: of the node. ``text``: ``phase/module/name``. ``kind``: of a collective. ``is_share``: the part of a
    collective's time in which its rank computes nothing. ``sent``: the data that a collective sends.
    """

    name: str
    text: str
    phase: Phase
    kind: str = ""
    is_share: bool = False
    sent: Sent | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def category(self) -> str:
        """The category in a trace: the kind of a collective, otherwise the phase."""
        return self.kind or self.phase


@dataclass(slots=True)
class _Lanes:
    """The tasks of a program in its order.

    ``makers``: for each node so far, the tasks that its readers wait for. ``unread``: the seconds in which a rank will
    copy the results of a collective, before their first reader. ``last``: the latest task of the computing lane; no
    collective starts before it ends.
    """

    program: Program
    makers: dict[fx.Node, tuple[Hashable, ...]] = field(default_factory=dict)
    unread: dict[fx.Node, float] = field(default_factory=dict)
    last: tuple[Hashable, ...] = ()

    def tasks(self) -> Iterator[Task]:
        """Every call that takes time, every collective, and the optimizer's step."""
        parts = split(self.program)
        for node in (*parts.update, *parts.forward, *parts.backward):
            if not is_getitem(node):
                yield from self._copies([self.program.value(read)[0] for read in node.all_input_nodes])
            if node.target in TRANSFERS:
                yield from self._transfer(node)
            elif not is_collective(node):
                yield from self._call(node)
            elif node.target in GO_ROUND:
                yield from self._ring(node)
            else:
                yield from self._collective(node)
        yield from self._copies(list(self.unread))
        if seconds := update_seconds(self.program):
            ends = tuple(dict.fromkeys(maker for makers in self.makers.values() for maker in makers))
            yield Task(Slice(OPTIMIZER, f"update/{OPTIMIZER}", "update"), (COMPUTING,), seconds, ends)

    def _call(self, node: fx.Node) -> Iterator[Task]:
        seconds = call_seconds(self.program, node, work_of(self.program).get(node))
        yield from self._compute(node, seconds, self._operand_makers(node))

    def _compute(self, node: fx.Node, seconds: float, after: tuple[Hashable, ...], part: str = "") -> Iterator[Task]:
        """A call, or a part of it, on the computing lane."""
        self.makers[node] = after
        if seconds:
            name = self._slice(node, part=part)
            self.makers[node] = self.last = (name,)
            yield Task(name, (COMPUTING,), seconds, after)

    def _ring(self, node: fx.Node) -> Iterator[Task]:
        """The tasks of a ring: the rank computes with the chunk that it has while the next one is on its way.

        It computes the last chunk once that has arrived, or the first chunk of a sum before any is sent.
        """
        operands, alone = self._operand_makers(node), chunk_seconds(self.program, node)
        if node.target is dots_scatter:
            yield from self._compute(node, alone, operands, " (first chunk)")
        yield from self._collective(node)
        sent = self.makers[node]
        yield from self._compute(node, call_seconds(self.program, node) - alone, operands)
        self.makers[node] = (*sent, *self.makers[node])
        if node.target is not dots_scatter:
            yield from self._compute(node, alone, self.makers[node], " (last chunk)")

    def _transfer(self, node: fx.Node) -> Iterator[Task]:
        after = tuple(dict.fromkeys((*self._operand_makers(node), *self.last)))
        name = self._slice(node, op_name(node.target))
        self.makers[node] = (name,)
        yield Task(name, (COPYING[node.target],), call_seconds(self.program, node), after)

    def _copies(self, read: Sequence[fx.Node]) -> Iterator[Task]:
        """The copies of results of collectives that are read for the first time."""
        for node in dict.fromkeys(read):
            if node in self.unread:
                yield from self._compute(node, self.unread.pop(node), self.makers[node], RESULTS_COPIED)

    def _collective(self, node: fx.Node) -> Iterator[Task]:
        collective = collective_at(self.program, node)
        seconds, link = collective_seconds(self.program, collective), link_of(self.program, collective)
        packing, unpacking = copy_seconds(self.program, node)
        yield from self._compute(node, packing, self._operand_makers(node), OPERANDS_COPIED)
        if unpacking:
            self.unread[node] = unpacking
        after = tuple(dict.fromkeys((*self._operand_makers(node), *self.last)))
        sent = Sent(collective.axes, collective.wire_bytes, collective.steps)
        name = self._slice(node, collective.kind, sent=sent)
        self.makers[node] = (name,)
        by = f"{BY}{link.name}" if isinstance(link, HierarchicalLink) else ""
        yield Task(name, (f"{OVER}{', '.join(collective.axes)}{by}",), seconds, after)
        if link.overlap < 1:
            share = Slice(name.name, f"{name.text} (its share)", name.phase, collective.kind, is_share=True)
            self.last = (share,)
            yield Task(share, (COMPUTING,), seconds * (1 - link.overlap), after)

    def _operand_makers(self, node: fx.Node) -> tuple[Hashable, ...]:
        return tuple(dict.fromkeys(maker for read in node.all_input_nodes for maker in self.makers.get(read, ())))

    def _slice(self, node: fx.Node, kind: str = "", part: str = "", sent: Sent | None = None) -> Slice:
        text, phase = range_name(self.program, node) + part, self.program.source(node).phase
        return Slice(node.name, text, phase, kind, sent=sent)


# The ranks of a pipeline: their tasks once a step, before and after the schedule.


@dataclass(frozen=True, slots=True)
class OnceAStep:
    """The name of a task that a rank of a pipeline runs once a step."""

    text: str
    category: Phase

    def __str__(self) -> str:
        return self.text


def _begin(record: StageRecord) -> Iterator[Task]:
    """Gathers and counts of each stage; a rank begins its stages one after the other."""
    for stage, rank in enumerate(record.schedule.place):
        took = sum(_seconds(record, stage, part) for part in BEFORE_SCHEDULE)
        yield Task(OnceAStep(f"stage {stage} begins", "forward"), (rank,), took)


def _end(record: StageRecord, scheduled: Timeline) -> Iterator[Task]:
    """The last messages, the reductions of each stage, and the optimizer's step of each rank."""
    sent, place = dict(_last_messages(record, scheduled)), record.schedule.place
    yield from sent.values()
    for stage, rank in enumerate(place):
        arrived = tuple(task.name for way, task in sent.items() if way.target == stage)
        yield Task(OnceAStep(f"stage {stage} ends", "backward"), (rank,), _seconds(record, stage, "after"), arrived)
    for rank in dict.fromkeys(place):
        names = {name for stage in record.schedule.stages_on(rank) for name in record.stages.stages[stage].parameters}
        yield Task(OnceAStep(f"{OPTIMIZER} of rank {rank}", "update"), (rank,), update_seconds(record.program, names))


def _last_messages(record: StageRecord, scheduled: Timeline) -> Iterator[tuple[Crossing, Task]]:
    """The messages that ranks send once all microbatches are done."""
    program, place, pipeline = record.program, record.schedule.place, record.program.options.pipeline
    assert pipeline is not None
    link = stage_link(program)
    for way in ways_after(record.stages):
        ends = place[way.source], place[way.target]
        if ends[0] != ends[1]:
            size = sum(nbytes(program.local_type(node)) for node in record.stages.crossings[way])
            name = OnceAStep(f"{way.source}→{way.target} at the end", "backward")
            last = scheduled.on(ends[0])[-1].name
            yield way, Task(name, (ends,), link.seconds("send", size, 2), (last,))


def _seconds(record: StageRecord, stage: int, part: Part) -> float:
    calls = record.stages.stages[stage].parts[part]
    return sum(seconds(record.program, node) for node in calls) * record.times(part)


GAIN = 0.8  # another assignment of links must take less than this part of the time


def slow_link_note(program: Program) -> str:
    """The axis that gains most from another assignment of links to axes, and the times of both; else an empty text."""
    machine, mesh, pipeline = program.options.machine, program.mesh, program.options.pipeline
    if mesh is None or not machine.links:
        return ""
    names = [name for name, size in mesh.sizes.items() if size > 1 and name != MICROBATCH]
    names += [pipeline.axis] if pipeline and pipeline.axis not in names and program.num_stages > 1 else []
    links = {name: machine.of_axis(name) for name in names}
    if len(set(links.values())) < 2:
        return ""
    collectives = collectives_of(program)
    now = _seconds_by_axis(program, collectives, links)
    assignments = [dict(zip(links, each, strict=True)) for each in permutations(links.values())]
    best = min(assignments, key=lambda each: sum(_seconds_by_axis(program, collectives, each).values()))
    then = _seconds_by_axis(program, collectives, best)
    if sum(then.values()) >= GAIN * sum(now.values()):
        return ""
    axis = max(links, key=lambda name: now[name] - then[name])
    over_axis = [each for each in collectives if axis in _axes(program, each)]
    count, sent = sum(each.times for each in over_axis), sum(each.times * each.wire_bytes for each in over_axis)
    others = ", ".join(f"{name} on {link.name}" for name, link in best.items() if link is not links[name])
    return (
        f"axis {axis} is on {links[axis].name}: {count} collectives a step send {bytes_text(sent)} over it\n"
        f"    all that is sent takes {seconds_text(sum(now.values()))} a step, "
        f"and {seconds_text(sum(then.values()))} with {others}\n"
        f"    lay the mesh so: ranks that differ in {axis} alone are those joined by {best[axis].name}"
    )


def _seconds_by_axis(
    program: Program, collectives: Sequence[Collective], links: Mapping[str, Link]
) -> dict[str, float]:
    """The time of each axis's collectives in a step over these links; those of several axes count in equal parts."""
    elsewhere = on_machine(program, replace(program.options.machine, links=links))
    seconds = dict.fromkeys(links, 0.0)
    for each in collectives:
        names = [name for name in _axes(program, each) if name in links]  # an axis of one rank has no link
        for name in names:
            seconds[name] += each.times * collective_seconds(elsewhere, each) / len(names)
    return seconds


def _axes(program: Program, collective: Collective) -> list[str]:
    assert program.mesh is not None
    axes = [axis for axis in collective.axes if axis != MICROBATCH]
    return [axis if collective.kind == "send" else parse_part(axis, program.mesh).name for axis in axes]
