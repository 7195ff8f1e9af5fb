"""A step of a pipeline as it is predicted: its schedule, and what each stage does once, before it and after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardc.cost import nbytes
from shardc.fact import Phase
from shardc.pipeline_cost import seconds
from shardc.stage import Crossing, Part
from shardc.stage_record import StageRecord
from shardc.stage_turns import ways_after
from shardc.step_time import OPTIMIZER, update_seconds
from shardc.timeline import Task, Timeline, timeline

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
