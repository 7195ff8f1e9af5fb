"""How the time of a run is shared out among its rows.

Each row is due the fewest rounds that say something. What is left beyond those of all rows levels them: a row goes on
until it has had as many seconds as each other one will have, or is known well enough, and what it leaves goes to those
after it. Where time is short a row is left out as soon as those after it that are needed as much would not end in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rounds import SCENE
from row import Row, is_ours

AROUND = 12.0  # seconds of a run before its first row and after its last: imports, processes, files
STEP = {"tiny": 0.02, "small": 0.43, "medium": 2.5}  # seconds of two ranks on two processors
MAKING = {"tiny": 0.5, "small": 1.0, "medium": 2.2}  # seconds in which shardc makes a step there
COMPILING = 30.0  # seconds in which Inductor does
SLOWER = {"sequence": 1.2, "pipeline": 1.2, "expert": 1.2}  # times a step as others are
FEWEST = {"tiny": 150, "small": 5, "medium": 5}  # rounds
BESIDE = 50  # rounds, the most that are due to a row that is not there for its time
UNTIMED = 2  # steps of everyone beside the rounds


class Use(IntEnum):
    """What a row is there for. Each gives way to those after it that are as great."""

    IF_LEFT = 0  # nothing is held back for it
    BYTES = 1  # bytes and memory, beside what the run is for: the fewest rounds
    LARGE = 2  # what the run is for, where the processors are fast enough
    TIME = 3  # what it is for in every run
    BOUND = 4  # bytes that are held to a bound: the fewest rounds, in every run


LEVELLED = (Use.LARGE, Use.TIME)


@dataclass(frozen=True, slots=True)
class Need:
    """Of a row: seconds before its rounds, of each, and the fewest rounds."""

    fixed: float
    round: float
    fewest: int
    use: Use = Use.TIME

    def seconds(self, rounds: int) -> float:
        """With so many rounds."""
        return self.fixed + rounds * self.round

    @property
    def least(self) -> float:
        """Seconds with the fewest rounds."""
        return self.seconds(self.fewest)


def need(row: Row, use: Use = Use.TIME, fewest: int | None = None) -> Need:
    """By what steps took on two processors; how fast those of a run are, its first rows tell."""
    ranks, ours = row.job.ranks, sum(map(is_ours, row.names))
    step = STEP[row.size] * (1 + 0.15 * (ranks - 2)) * SLOWER.get(row.plan, 1.0)
    making = MAKING[row.size] * ranks / 2 * ours + ("compiled" in row.plan) * COMPILING * len(row.names)
    beside = len(row.names) - ours - 1  # one device and the peers that are far behind
    fixed = making + step * (UNTIMED * len(row.names) + SCENE * beside)
    due = FEWEST[row.size] if use in LEVELLED else min(FEWEST[row.size], BESIDE)
    return Need(fixed, step * (ours + 1), due if fewest is None else fewest, use)


class Budget:
    """Seconds for all rows, in their order.

    State: ``_next``, the row that is asked for; ``_start``, when it was; ``_taken``, seconds of those that are done,
    and ``_expected``, by their needs.
    """

    def __init__(self, seconds: float, needs: Sequence[Need], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._needs, self._next = clock, needs, -1
        self._begin = self._start = clock()
        self._end, self._taken, self._expected = self._begin + seconds, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """To the end."""
        return self._end - self._clock()

    def share(self) -> float | None:
        """Seconds in which the next row may take more than its fewest rounds.

        None where it or one that it gives way to would not end in time. The first is never left out: it tells how fast
        the processors are.
        """
        self._next += 1
        self._start = self._clock()
        own, later = self._needs[self._next], self._needs[self._next + 1 :]
        if self._expected and self._least(own, *(each for each in later if each.use >= own.use)) > self.left:
            return None
        if own.use in (Use.BYTES, Use.BOUND):
            return 0.0
        rest = self.left - self._least(*(each for each in later if each.use in (Use.BYTES, Use.BOUND)))
        return level([self._least(each) for each in (own, *later) if each.use in (own.use, *LEVELLED)], rest)

    def note(self, rounds: int) -> None:
        """The row is done, with so many rounds."""
        self._taken += self._clock() - self._start
        self._expected += self._needs[self._next].seconds(rounds)

    def _least(self, *needs: Need) -> float:
        """Seconds of their fewest rounds, on processors as fast as they were so far."""
        speed = self._taken / self._expected if self._expected else 1.0
        return speed * sum(each.least for each in needs)


def level(least: Sequence[float], seconds: float) -> float:
    """The seconds of each of those that have more than their least, where all together have so many; 0: none has."""
    rest = sorted(least)
    while rest and seconds < rest[-1] * len(rest):
        seconds -= rest.pop()
    return seconds / len(rest) if rest else 0.0
