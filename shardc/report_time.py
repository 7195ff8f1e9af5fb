"""What the HTML report draws over time: a pipeline's schedule, and the predicted step of one rank. In seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any

from shardc.action import Action
from shardc.program import Program
from shardc.stage_record import StageRecord
from shardc.step_time import COMPUTING, OVER, Slice, step_timeline
from shardc.timeline import Task, Timeline, rounded

SMALLEST = 5e-4  # of a step: a gap shorter than that parts no boxes


def schedule_lanes(program: Program) -> dict[str, Any]:
    """``ranks``: by rank of a pipeline what it computes when; ``idle``: the part of all their time."""
    found = StageRecord(program).timeline
    critical = {task.name for task in found.critical_path}
    return {
        "makespan": rounded(found.makespan),
        "idle": rounded(found.idle_fraction),
        "ranks": [
            [_action(found, task, task.name in critical) for task in found.on(rank) if task.seconds]
            for rank in found.ranks
        ],
    }


def _action(found: Timeline, task: Task, is_critical: bool) -> dict[str, Any]:
    action = task.name
    assert isinstance(action, Action), action
    return {
        "name": str(action),
        "kind": action.kind,
        "stage": action.stage,
        "microbatch": action.microbatch,
        "start": rounded(found.starts[task.name]),
        "seconds": rounded(task.seconds),
        "critical": is_critical,
    }


def step_lanes(program: Program) -> dict[str, Any]:
    """``computing``: boxes ``[phase, start, seconds]``; ``collectives``: by axes ``[name, start, seconds]`` of each."""
    found = step_timeline(program)
    lanes = dict.fromkeys(lane for task in found.tasks for lane in task.lanes if lane != COMPUTING)
    return {
        "makespan": rounded(found.makespan),
        "computing": list(_boxes(found)),
        "collectives": {_axes(lane): [_collective(found, task) for task in found.on(lane)] for lane in lanes},
    }


def _boxes(found: Timeline) -> Iterator[list[Any]]:
    """Computations of one phase that follow each other as one."""
    end, number, numbered = 0.0, 0, []
    for task in found.on(COMPUTING):
        number += found.starts[task.name] - end > SMALLEST * found.makespan
        end = found.end(task)
        numbered.append((number, task))
    for (_, phase), group in groupby(numbered, lambda each: (each[0], _slice(each[1]).phase)):
        tasks = [task for _, task in group]
        start = found.starts[tasks[0].name]
        yield [phase, rounded(start), rounded(found.end(tasks[-1]) - start)]


def _collective(found: Timeline, task: Task) -> list[Any]:
    return [_slice(task).name, rounded(found.starts[task.name]), rounded(task.seconds)]


def _slice(task: Task) -> Slice:
    assert isinstance(task.name, Slice), task
    return task.name


def _axes(lane: Hashable) -> str:
    return str(lane).removeprefix(OVER)
