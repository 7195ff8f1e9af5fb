"""Whose turn it is of a rank's stages: one that is idle may lie in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.action import COMPUTE, Schedule
from shardc.stage import Crossing, Stages


def ways_after(stages: Stages) -> list[Crossing]:
    """What stages send each other once all microbatches are done, in the order in which it is sent."""
    return sorted((way for way in stages.crossings if way.part == "after"), key=lambda way: (way.source, way.target))


def turns_of(stages: Stages, schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank in the order in which it works on them in a step.

    Each begins; then come the computations of the schedule; then what is sent once all microbatches are done; then each
    stage closes.
    """
    here = tuple(schedule.stages_on(rank))
    scheduled = (action.stage for action in schedule.actions[rank] if action.kind in COMPUTE)
    sending = (way.source for way in ways_after(stages) if way.source in here)
    return (*here, *scheduled, *sending, *here)


class Turns:
    """The stages of a rank that are on its device: the one whose turn it is, and the one whose turn is next.

    State: ``here``, these; ``left``, the turns to come.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self.left, self.here = list(reversed(turns)), tuple[int, ...]()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Begin the next turn: the stages that leave the device, and after that those that come there."""
        before, turn = self.here, self.left.pop()
        self.here = tuple(dict.fromkeys((turn, *self.left[-1:])))
        leave = tuple(stage for stage in before if stage not in self.here)
        return leave, tuple(stage for stage in self.here if stage not in before)
