"""The rounds of a row, and the ratios of their step times.

A row ends when the 95 % interval of its ratios is narrow enough or its time is over. Only the width of the interval
counts, never the side of 1 on which it lies: stopping as soon as a result looks good would bias it. The width is
checked at few rounds, since frequent checks would find a narrow interval by chance.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from breakdown import Clock
from row import ONE_DEVICE, is_ours

T = TypeVar("T")
SCENE = 2  # rounds in which all ways take part; later ones only time shardc and its fastest peer
WITHIN = 0.015  # a ratio is known when its interval is this narrow to either side
RESAMPLES = 2000  # samples of the bootstrap
FIRST_LOOK = 10  # rounds before the first check; each later check comes after a quarter more


@dataclass(frozen=True, slots=True)
class Steps:
    """The number of rounds of a row: ``least`` to ``most``, as many as fit in ``seconds`` from the start of the row.

    No round begins that would end after ``latest`` seconds. A round times one step of each way. Two more steps are not
    timed: the first and a profiled one.
    """

    least: int = 5
    most: int = 1000
    seconds: float = math.inf
    latest: float = math.inf


class Runner(Protocol):
    """One way to train, on this rank."""

    name: str

    @property
    def steps(self) -> dict[int, Clock]:
        """The time of each step, by round."""

    def timed_step(self, number: int) -> None:
        """Time the step of a round, which all ranks begin together."""


def take_rounds(runners: Sequence[Runner], steps: Steps, begun: float) -> None:
    """Take rounds until the ratios are known or the time is over. Rank 0 decides for all ranks."""
    clock, deciding = time.perf_counter, runners
    for i in range(steps.most):
        start = clock()
        for runner in everyone_first(runners if i < SCENE else deciding, i):
            runner.timed_step(i)
        if i + 1 == SCENE:
            deciding = _decisive(runners)
        if i + 1 < SCENE:
            continue
        end = 2 * clock() - start - begun  # when another round would end
        are_enough = i + 1 >= steps.least
        is_known = are_enough and is_look(i + 1) and known(deciding)
        if _rank_zero_says(is_known or end > steps.latest or (are_enough and end > steps.seconds)):
            break


def everyone_first(runners: Sequence[T], i: int) -> list[T]:
    """The runners in the order of round ``i``; the first runner changes from round to round."""
    first = i % len(runners)
    return [*runners[first:], *runners[:first]]


def is_look(rounds: int) -> bool:
    """Whether the interval is checked after this many rounds."""
    return rounds in takewhile(lambda look: look <= rounds, _looks())


def _looks() -> Iterator[int]:
    look = FIRST_LOOK
    while True:
        yield look
        look += look // 4


def known(deciding: Sequence[Runner]) -> bool:
    """Whether all ratios of shardc to the peer are known, by the steps of the slowest rank; False except on rank 0.

    This is a collective call: all ranks must make it.
    """
    slowest = {runner.name: _slowest(runner.steps) for runner in deciding}
    theirs = next(times for name, times in slowest.items() if not is_ours(name))
    ours = [times for name, times in slowest.items() if is_ours(name)]
    return dist.get_rank() == 0 and all(ratio(times, theirs).is_within(WITHIN) for times in ours)


def _slowest(steps: Mapping[int, Clock]) -> dict[int, float]:
    """For each round, the seconds of the slowest rank."""
    seconds = torch.tensor([step.seconds for step in steps.values()], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(steps, seconds.tolist(), strict=True))


def _decisive(runners: Sequence[Runner]) -> list[Runner]:
    """The runners of shardc and of the fastest peer by rank 0's clock."""
    peers = [i for i, runner in enumerate(runners) if runner.name != ONE_DEVICE and not is_ours(runner.name)]
    best = {i: min(step.seconds for step in runners[i].steps.values()) for i in peers}
    fastest = _rank_zero_says(min(peers, key=lambda i: best[i]))
    return [runner for i, runner in enumerate(runners) if i == fastest or is_ours(runner.name)]


def _rank_zero_says(number: int) -> int:
    """Broadcast the number of rank 0 to all ranks."""
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of step times: of the medians, and the median of the ratios of all rounds (``paired``).

    ``low`` and ``high`` bound the 95 % bootstrap interval of ``paired``. The steps of one round follow each other, so
    the speed of the machine hardly changes between them.
    """

    medians: float
    paired: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.paired:.2f} ({self.low:.2f} to {self.high:.2f})"

    def is_within(self, part: float) -> bool:
        """Whether the interval is at most this wide to either side, relative to the ratio."""
        return self.high - self.low <= 2 * part * self.paired


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio:
    """The ratio over the rounds that both took part in, with a bootstrap interval."""
    rounds, rng = sorted(ours.keys() & theirs.keys()), random.Random(0)
    pairs = [ours[i] / theirs[i] for i in rounds]
    of_medians = median(ours[i] for i in rounds) / median(theirs[i] for i in rounds)
    resampled = (median(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(of_medians, median(pairs), *_interval(resampled))


def ratio_apart(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of medians of steps that were not taken in the same rounds."""
    rng, of_medians = random.Random(0), median(ours) / median(theirs)
    both = ((rng.choices(ours, k=len(ours)), rng.choices(theirs, k=len(theirs))) for _ in range(RESAMPLES))
    return Ratio(of_medians, of_medians, *_interval(median(a) / median(b) for a, b in both))


def _interval(resampled: Iterable[float]) -> tuple[float, float]:
    """The interval that contains 95 % of the values."""
    found = sorted(resampled)
    return found[RESAMPLES // 40], found[-RESAMPLES // 40 - 1]
