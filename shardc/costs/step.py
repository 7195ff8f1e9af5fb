"""The cost of a step for a dump: predicted times, traffic, memory and operations of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardc.costs.count import flops_of, nbytes, results_by_parameter
from shardc.costs.memory import memory_of
from shardc.costs.records import AxesTime, Copies, CopyTime, MemoryEntry, OuterEntry, TimeEntry, TrafficEntry, Way
from shardc.costs.replay import ledgers_of
from shardc.costs.stages.record import StageRecord, calls_of_step
from shardc.costs.step_time import COMPUTING, COPYING, OPTIMIZER, OVER, Slice, axes_and_link, step_timeline
from shardc.language.sharding import TensorType, ceil_div
from shardc.language.text import bytes_text, seconds_text, table
from shardc.ops.reduction import wide_dtype
from shardc.ops.tier import TRANSFERS
from shardc.options import Local
from shardc.program.communication import is_fetch
from shardc.program.program import Program, parameters_of
from shardc.program.provenance import Phase
from shardc.program.stages import has_stages
from shardc.program.text import flops_text, memory_text, rank_axes
from shardc.program.traffic import Size, Traffic, collectives_of, traffic_of, traffic_text
from shardc.schedules.clock import Task
from shardc.schedules.timeline import Timeline, rounded
from shardc.wire import codec_named


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step for one rank.

    ``traffic``: collectives by phase, kind and axes. ``memory``: bytes by class. ``flops``: floating-point operations.
    ``copies``: between the device and the tier below.
    """

    traffic: tuple[Traffic, ...]
    memory: Mapping[str, Size]
    flops: Size
    copies: tuple[Copies, ...] = ()

    def entries(self) -> tuple[tuple[TrafficEntry, ...], MemoryEntry, int]:
        """Traffic, memory and operations as records have them."""
        names = ("phase", "kind", "axes", "values", "count", "bytes", "wire_bytes")
        traffic = tuple(TrafficEntry(*(getattr(each, name) for name in names)) for each in self.traffic)
        return traffic, MemoryEntry(**self.memory), self.flops

    def text(self) -> str:
        """The cost as tables."""
        traffic, flops = traffic_text(self.traffic, has_values=True), flops_text({"one rank": self.flops})
        return "\n".join(filter(None, (traffic, memory_text(self.memory), copies_text(self.copies), flops)))


def step_cost(program: Program) -> StepCost:
    """The cost of a lowered or localized program; of a pipeline, memory and operations are each of the fullest rank."""
    traffic = tuple(traffic_of(collectives_of(program)))
    return StepCost(traffic, memory_of(program), rank_flops(program), copies_of(program))


def copies_of(program: Program) -> tuple[Copies, ...]:
    """The copies of a step between the device and the tier below; in a pipeline those of all stages, as in traffic."""
    found = dict[tuple[Phase, Way], list[int]]()
    for node, times in calls_of_step(program):
        if node.target in TRANSFERS:
            phase: Phase = program.source(node).phase
            way: Way = "fetched" if is_fetch(node) else "offloaded"
            found.setdefault((phase, way), []).extend([nbytes(program.local_type(node))] * times)
    return tuple(Copies(*key, len(sizes), sum(sizes)) for key, sizes in found.items())


def copies_text(copies: Sequence[Copies]) -> str:
    """A table; empty if nothing is copied."""
    rows = [(each.phase, each.way, each.count, bytes_text(each.bytes)) for each in copies]
    return table(("phase", "copies of a step", "count", "bytes"), rows) if rows else ""


def outer_entry(program: Program) -> OuterEntry | None:
    """The outer steps of groups that train by themselves; None if all ranks train together, or nothing is trained."""
    local, trained = program.options.local, set(results_by_parameter(program, "gradient"))
    if local is None or local.groups is None or not trained:
        return None
    nodes, count = parameters_of(program), local.groups
    shards = [[program.local_type(nodes[name]) for name in held & trained] for held in _held(program)]
    sent = max(_change_bytes(list(filter(None, each)), local) for each in shards)
    wire_bytes = 2 * (sent * (count - 1) // count)  # each rank adds a piece of all changes, and sends the sum
    ranks = count * prod(rank_axes(program).values())
    link = program.options.machine.of_stages(local.axis, ranks)
    return OuterEntry(
        local.axis, count, local.every, wire_bytes, rounded(link.seconds("all_reduce", wire_bytes, count)), local.after
    )


def _held(program: Program) -> list[set[str]]:
    """The parameters that each rank of a pipeline holds; without one all of them."""
    return [set(ledger.parameters) for ledger in ledgers_of(program)]


def _change_bytes(shards: Sequence[TensorType], local: Local) -> int:
    """The bytes of a rank's shards of parameters as their changes are sent: float32 or wider, or codes."""
    if local.wire is None:
        return sum(each.numel * wide_dtype(each.dtype).itemsize for each in shards)
    codec = codec_named(local.wire)
    elements = sum(ceil_div(each.numel, codec.block) * codec.block for each in shards)
    pieces = codec.block * (local.groups or 1)  # of equal length
    return codec.nbytes(ceil_div(elements, pieces) * pieces)


def outer_note(entry: OuterEntry | None) -> str:
    """A line about the bytes that groups send in outer steps; empty if there are none."""
    if entry is None:
        return ""
    sent, each = bytes_text(entry.wire_bytes), bytes_text(entry.wire_bytes // entry.every)
    return (
        f"{entry.groups} groups along {entry.axis} train by themselves: every {entry.every} steps a rank sends {sent} "
        f"over {entry.axis} in {seconds_text(entry.seconds)}, {each} a step"
        + (f"; the first {entry.after} steps send as much each" if entry.after else "")
    )


def rank_flops(program: Program) -> int:
    """Operations of a step on one rank; of a pipeline, on the rank that has most of them."""
    return StageRecord(program).rank_flops if has_stages(program) else flops_of(program, of_rank=True)


@dataclass(frozen=True)
class StepRecord:
    """The predicted time of a step, of one rank or of all ranks of a pipeline."""

    program: Program

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the step."""
        return step_timeline(self.program)

    def entry(self) -> TimeEntry:
        """The entry; for a pipeline only ``step``, since its schedule has the rest."""
        step = rounded(self.timeline.makespan)
        if has_stages(self.program):
            return TimeEntry(step)
        waiting = self._waiting_seconds()
        lanes = dict.fromkeys(lane for task in self.timeline.tasks for lane in task.lanes if lane != COMPUTING)
        sums = {"computing": 0.0, OPTIMIZER: 0.0, "shared": 0.0}
        for task in self.timeline.on(COMPUTING):
            sums[_kind(task)] += task.seconds
        collectives, copies = list[AxesTime](), list[CopyTime]()
        for lane in lanes:
            tasks = self.timeline.on(lane)
            times = len(tasks), rounded(sum(task.seconds for task in tasks)), rounded(waiting[lane])
            if lane in COPYING.values():
                copies.append(CopyTime(lane, *times))  # type: ignore[arg-type]
            else:
                collectives.append(AxesTime(axes_and_link(lane)[0], *times))
        computing, optimizer, shared = (rounded(sums[name]) for name in ("computing", OPTIMIZER, "shared"))
        return TimeEntry(step, computing, optimizer, shared, tuple(collectives), tuple(copies) or None)

    def text(self) -> str:
        """A table."""
        entry = self.entry()
        links = dict(axes_and_link(lane) for task in self.timeline.tasks for lane in task.lanes)
        rows: list[tuple[object, ...]] = [
            (name, "", seconds_text(took), "", "")
            for name in ("computing", "shared", "optimizer")
            if (took := getattr(entry, name))
        ]
        rows += [
            (OVER + each.axes, each.count, seconds_text(each.seconds), seconds_text(each.waited), links[each.axes])
            for each in entry.collectives or ()
        ]
        rows += [
            (each.way, each.count, seconds_text(each.seconds), seconds_text(each.waited), "")
            for each in entry.copies or ()
        ]
        rows.append(("total", "", seconds_text(entry.step), "", ""))
        return table(("predicted step", "count", "time", "waited for", "link"), rows)

    def _waiting_seconds(self) -> Counter[object]:
        """For each lane the time that the computing lane is idle until a task on it ends."""
        lanes, waiting = {task.name: task.lanes[0] for task in self.timeline.tasks}, Counter[object]()
        for name, seconds in self.timeline.waited(COMPUTING).items():
            waiting[lanes[name]] += seconds  # type: ignore[assignment]
        return waiting


def _kind(task: Task) -> str:
    name = task.name
    assert isinstance(name, Slice), name
    return "shared" if name.is_share else OPTIMIZER if name.name == OPTIMIZER else "computing"
