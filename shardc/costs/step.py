"""What a dump says of a step's predicted time: how long a rank computes, sends, and waits for what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc.costs.count import flops_of, memory_of, nbytes
from shardc.costs.pipeline_memory import ways_after
from shardc.costs.stage_record import StageRecord
from shardc.costs.time import COMPUTING, OPTIMIZER, OVER, Slice, seconds, step_timeline, update_seconds
from shardc.language.machine import Machine
from shardc.language.text import table
from shardc.program.program import Program
from shardc.program.provenance import Phase
from shardc.program.stages import Crossing, Part, has_stages
from shardc.program.text import flops_text, memory_text
from shardc.program.traffic import Size, Traffic, collectives_of, traffic_of, traffic_text
from shardc.schedules.timeline import Task, Timeline, rounded, timeline


def has_machine(program: Program) -> bool:
    """Whether a lowered program was compiled for a machine that was named, so that its times mean something."""
    return program.level in ("lowered", "localized") and program.options.machine != Machine()


@dataclass(frozen=True)
class StepRecord:
    """One step on the machine that a program was compiled for: of one rank, of a pipeline of all."""

    program: Program

    @cached_property
    def timeline(self) -> Timeline:
        """When all of it happens."""
        return step_timeline(self.program)

    def entry(self) -> dict[str, Any]:
        """The JSON form, in seconds; of a pipeline its ``step`` alone, see its schedule.

        ``computing``: of forward and backward. ``shared``: of collectives that take the rank's own processor.
        ``collectives``: by axes, how many, how long they take, and for how long nothing is computed because of them.
        """
        if has_stages(self.program):
            return {"step": rounded(self.timeline.makespan)}
        waited = self._waited
        lanes = dict.fromkeys(lane for task in self.timeline.tasks for lane in task.lanes if lane != COMPUTING)
        return {
            "step": rounded(self.timeline.makespan),
            "computing": self._sum("computing"),
            "optimizer": self._sum(OPTIMIZER),
            "shared": self._sum("shared"),
            "collectives": [
                {
                    "axes": str(lane).removeprefix(OVER),
                    "count": len(self.timeline.on(lane)),
                    "seconds": rounded(sum(task.seconds for task in self.timeline.on(lane))),
                    "waited": rounded(waited[lane]),
                }
                for lane in lanes
            ],
        }

    def text(self) -> str:
        """A table, in milliseconds."""
        found = self.entry()
        rows = [(name, "", _ms(found[name]), "") for name in ("computing", "shared", "optimizer") if found.get(name)]
        rows += [
            (OVER + e["axes"], e["count"], _ms(e["seconds"]), _ms(e["waited"])) for e in found.get("collectives", ())
        ]
        return table(("predicted step", "count", "ms", "waited for"), [*rows, ("total", "", _ms(found["step"]), "")])

    def _sum(self, kind: str) -> float:
        return rounded(sum(task.seconds for task in self.timeline.on(COMPUTING) if _kind(task) == kind))

    @cached_property
    def _waited(self) -> Counter[object]:
        """For each lane how long the computing one stands still until something on it has ended."""
        lanes = {task.name: task.lanes[0] for task in self.timeline.tasks}
        waited, now = Counter[object](), 0.0
        for task in self.timeline.on(COMPUTING):
            start = self.timeline.starts[task.name]
            if start > now:
                waited[lanes[self.timeline.reasons[task.name]]] += start - now  # type: ignore[assignment]
            now = self.timeline.end(task)
        if self.timeline.makespan > now:
            last = max(self.timeline.tasks, key=self.timeline.end)
            waited[last.lanes[0]] += self.timeline.makespan - now  # type: ignore[assignment]
        return waited


def _kind(task: Task) -> str:
    name = task.name
    assert isinstance(name, Slice), name
    return "shared" if name.is_share else OPTIMIZER if name.name == OPTIMIZER else "computing"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


BEFORE: tuple[Part, ...] = ("once", "count", "settle")


@dataclass(frozen=True, slots=True)
class Once:
    """What a rank does once a step, ``text`` says what."""

    text: str
    category: Phase

    def __str__(self) -> str:
        return self.text


def whole_step(record: StageRecord) -> Timeline:
    """The timeline of a step: gathers and counts, the schedule, sums over stages and ranks, Adam's step.

    A rank begins its stages one after the other, and ends them so once its part of the schedule is done.
    """
    scheduled = record.timeline
    return timeline((*_begin(record), *scheduled.tasks, *_end(record, scheduled)), scheduled.ranks)


def _begin(record: StageRecord) -> Iterator[Task]:
    for stage, rank in enumerate(record.schedule.place):
        took = sum(_seconds(record, stage, part) for part in BEFORE)
        yield Task(Once(f"stage {stage} begins", "forward"), (rank,), took)


def _end(record: StageRecord, scheduled: Timeline) -> Iterator[Task]:
    sent, place = dict(_sent(record, scheduled)), record.schedule.place
    yield from sent.values()
    for stage, rank in enumerate(place):
        arrived = tuple(task.name for way, task in sent.items() if way.target == stage)
        yield Task(Once(f"stage {stage} ends", "backward"), (rank,), _seconds(record, stage, "after"), arrived)
    for rank in dict.fromkeys(place):
        held = {name for i in record.schedule.stages_on(rank) for name in record.stages.stages[i].parameters}
        yield Task(Once(f"{OPTIMIZER} of rank {rank}", "update"), (rank,), update_seconds(record.program, held))


def _sent(record: StageRecord, scheduled: Timeline) -> Iterator[tuple[Crossing, Task]]:
    """What ranks send each other once all microbatches are done."""
    program, place, pipeline = record.program, record.schedule.place, record.program.options.pipeline
    assert pipeline is not None
    link = program.options.machine.of_axis(pipeline.axis)
    for way in ways_after(record.stages):
        ends = place[way.source], place[way.target]
        if ends[0] != ends[1]:
            size = sum(nbytes(program.local_type(node)) for node in record.stages.crossings[way])
            name = Once(f"{way.source}→{way.target} at the end", "backward")
            last = scheduled.on(ends[0])[-1].name
            yield way, Task(name, (ends,), link.seconds("send", size, 2), (last,))


def _seconds(record: StageRecord, stage: int, part: Part) -> float:
    calls = record.stages.stages[stage].parts[part]
    return sum(seconds(record.program, node) for node in calls) * record.times(part)


@dataclass(frozen=True, slots=True)
class StepCost:
    """``traffic`` in the order in which each first occurs; ``memory`` in bytes by class; ``flops`` of a rank."""

    traffic: tuple[Traffic, ...]
    memory: Mapping[str, Size]
    flops: Size

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("phase", "kind", "axes", "values", "count", "bytes", "wire_bytes")
        traffic = [{name: getattr(each, name) for name in names} for each in self.traffic]
        return {"traffic": traffic, "memory": dict(self.memory), "flops": self.flops}

    def text(self) -> str:
        """Three tables; numbers in full."""
        parts = (
            traffic_text(self.traffic, has_values=True),
            memory_text(self.memory),
            flops_text({"one rank": self.flops}),
        )
        return "\n".join(parts)


def step_cost(program: Program) -> StepCost:
    """Of a lowered or localized program; of a pipeline the memory and operations are those of its fullest rank."""
    return StepCost(tuple(traffic_of(collectives_of(program))), memory_of(program), rank_flops(program))


def rank_flops(program: Program) -> int:
    """Those of a step; in a pipeline, of the rank that has most of them."""
    return StageRecord(program).rank_flops if has_stages(program) else flops_of(program, of_rank=True)
