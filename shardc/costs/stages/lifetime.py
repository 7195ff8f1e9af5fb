"""Lifetimes in a pipeline: the values that parts of a stage keep for later parts, and the stages on a device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shardc.language.words import Part
from shardc.program.lifetime import dies_at, is_whole
from shardc.program.node import operand
from shardc.program.stages import SCHEDULED, Crossing, Stages
from shardc.schedules.schedule import COMPUTE, Schedule


def kept_after(stages: Stages, index: int) -> dict[Part, set[fx.Node]]:
    """For each part that runs for every microbatch, the values that later parts read, or that are returned."""
    kept: dict[Part, set[fx.Node]] = {"count": set()}
    results = enumerate(stages.program.results)
    later = {node for i, node in results if node is not None and stages.home.get(i) == index}
    for part in reversed(SCHEDULED):
        kept[part] = later
        reads = {read for node in stages.stages[index].parts[part] for read in node.all_input_nodes}
        later = later | reads | read_beside(stages, index, part)
    return kept


def read_beside(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """The values that are read right after a part: those that are sent, and those that are added to sums."""
    ways = [way for way in stages.crossings if (way.source, way.part) == (index, part)]
    sent = {node for way in ways for node in stages.crossings[way]}
    return sent | {operand(node) for node in stages.stages[index].sums[part]}


def sums_in_place(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """The sums of a part that may be accumulated in the memory of their first summand."""
    program, calls = stages.program, stages.stages[index].parts[part]
    positions = {node: i for i, node in enumerate(calls)}
    return {
        sum_
        for sum_ in stages.stages[index].sums[part]
        if is_whole(operand(sum_), program) and dies_at(operand(sum_), sum_, positions | {sum_: len(calls)})
    }


def ways_after(stages: Stages) -> list[Crossing]:
    """The crossings that are sent once all microbatches are done, in the order in which they are sent."""
    return sorted((way for way in stages.crossings if way.part == "after"), key=lambda way: (way.source, way.target))


def stage_turns(stages: Stages, schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank in the order in which it works on them in a step.

    Each stage begins. Then come the computations of the schedule, the messages after all microbatches, and the end of
    each stage.
    """
    here = tuple(schedule.stages_on(rank))
    scheduled = (action.stage for action in schedule.actions[rank] if action.kind in COMPUTE)
    sending = (way.source for way in ways_after(stages) if way.source in here)
    return (*here, *scheduled, *sending, *here)


class ResidentStages:
    """The stages of a rank that are on its device if idle stages are offloaded: the current one and the next one.

    State: ``here``, these two; ``left``, the coming turns, last one first.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self.left, self.here = list(reversed(turns)), tuple[int, ...]()

    def advance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Begin the next turn; return the stages that leave the device, and those that come back to it."""
        before, turn = self.here, self.left.pop()
        self.here = tuple(dict.fromkeys((turn, *self.left[-1:])))
        leaving = tuple(stage for stage in before if stage not in self.here)
        return leaving, tuple(stage for stage in self.here if stage not in before)
