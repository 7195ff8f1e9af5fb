"""The time budget of a run, divided among its rows.

Each row gets at least the fewest rounds that are meaningful. The remaining time is shared equally: a row continues
until it has used its share or its ratio is known, and leaves the rest to later rows. If time is short, a row is left
out when it or later rows of at least the same importance would not finish otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rounds import SCENE
from row import Row, is_ours

AROUND = 12.0  # seconds before the first row and after the last: imports, processes, files
STEP = {"tiny": 0.02, "small": 0.43, "medium": 2.5}  # seconds of a step, two ranks on two processors
MAKING = {"tiny": 0.5, "small": 1.0, "medium": 2.2}  # seconds that shardc takes to compile
COMPILING = 30.0  # seconds that Inductor takes to compile
SLOWER = {"sequence": 1.2, "pipeline": 1.2, "expert": 1.2}  # time of a step relative to other plans
FEWEST = {"tiny": 150, "small": 5, "medium": 5}  # fewest rounds of a row
BESIDE = 50  # the most that this number can be for a row that is run for its bytes
UNTIMED = 2  # steps of each way that precede the rounds


class Use(IntEnum):
    """The purpose of a row, and its importance: a row gives way to later rows of the same or greater importance."""

    IF_LEFT = 0  # no time is reserved
    BYTES = 1  # for bytes and memory: the fewest rounds
    LARGE = 2  # for step time, if the processors are fast enough
    TIME = 3  # for step time, in every run
    BOUND = 4  # for bytes that must stay within a bound: the fewest rounds, in every run


LEVELLED = (Use.LARGE, Use.TIME)


@dataclass(frozen=True, slots=True)
class Need:
    """The time of a row: seconds before its rounds, seconds of a round, and the fewest rounds."""

    fixed: float
    round: float
    fewest: int
    use: Use = Use.TIME

    def seconds(self, rounds: int) -> float:
        """The seconds that the row takes with this many rounds."""
        return self.fixed + rounds * self.round

    @property
    def least(self) -> float:
        """The seconds that the row takes with the fewest rounds."""
        return self.seconds(self.fewest)


def need(row: Row, use: Use = Use.TIME, fewest: int | None = None) -> Need:
    """An estimate of the time of a row, from steps on two processors; the first rows of a run calibrate it."""
    ranks, ours = row.job.ranks, sum(map(is_ours, row.names))
    step = STEP[row.size] * (1 + 0.15 * (ranks - 2)) * SLOWER.get(row.plan, 1.0)
    making = MAKING[row.size] * ranks / 2 * ours + ("compiled" in row.plan) * COMPILING * len(row.names)
    beside = len(row.names) - ours - 1  # one device, and the far slower peers
    fixed = making + step * (UNTIMED * len(row.names) + SCENE * beside)
    due = FEWEST[row.size] if use in LEVELLED else min(FEWEST[row.size], BESIDE)
    return Need(fixed, step * (ours + 1), due if fewest is None else fewest, use)


class Budget:
    """Divides the seconds of a run among its rows, in order.

    State: ``_next``, the index of the current row; ``_start``, when it began; ``_taken``, the seconds that
    finished rows took; ``_expected``, the seconds that were estimated for them.
    """

    def __init__(self, seconds: float, needs: Sequence[Need], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._needs, self._next = clock, needs, -1
        self._begin = self._start = clock()
        self._end, self._taken, self._expected = self._begin + seconds, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """Seconds to the end."""
        return self._end - self._clock()

    def share(self) -> float | None:
        """The seconds of the next row; None if it or a later row of the same importance or more would not end in time.

        The first row is never left out: it calibrates the estimates.
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
        """Record that the current row has ended after this many rounds."""
        self._taken += self._clock() - self._start
        self._expected += self._needs[self._next].seconds(rounds)

    def _least(self, *needs: Need) -> float:
        """Seconds that rows take with their fewest rounds, at the speed of the finished rows."""
        speed = self._taken / self._expected if self._expected else 1.0
        return speed * sum(each.least for each in needs)


def level(least: Sequence[float], seconds: float) -> float:
    """The equal share of ``seconds`` that rows get after rows with a larger ``least``; 0 if no row is left."""
    rest = sorted(least)
    while rest and seconds < rest[-1] * len(rest):
        seconds -= rest.pop()
    return seconds / len(rest) if rest else 0.0
