"""How a row's rounds go: who takes part in each, and when there are enough.

A row ends when its ratios are known well enough or its time is over. What is known is told by the width of the 95 %
interval alone, never by the side of 1 on which it lies: a row that stopped as soon as it looks good would choose the
answer that it likes. Whoever looks often finds a narrow interval by chance: it is looked at seldom.
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
SCENE = 2  # rounds of everyone; those after them are of shardc and its fastest peer
WITHIN = 0.015  # to either side of a ratio: known well enough
RESAMPLES = 2000  # of the bootstrap
FIRST_LOOK = 10  # rounds; then at each quarter more


@dataclass(frozen=True, slots=True)
class Steps:
    """How many rounds there are, in each of which a step is timed: from ``least`` to ``most``, as ``seconds`` allow.

    The seconds are for the row, from its start to its end. After ``latest`` of them there is no round more in any case.
    Two more steps are not timed: the first, and one that is profiled.
    """

    least: int = 5
    most: int = 1000
    seconds: float = math.inf
    latest: float = math.inf


class Runner(Protocol):
    """One way to train on this rank."""

    name: str

    @property
    def steps(self) -> dict[int, Clock]:
        """What each took, by round."""

    def timed_step(self, number: int) -> None:
        """A round's step, which all ranks begin together."""


def take_rounds(runners: Sequence[Runner], steps: Steps, begun: float) -> None:
    """Rounds until enough is known or it would be too late for another; all ranks do as rank 0 says."""
    clock, deciding = time.perf_counter, runners
    for i in range(steps.most):
        start = clock()
        for runner in everyone_first(runners if i < SCENE else deciding, i):
            runner.timed_step(i)
        if i + 1 == SCENE:
            deciding = _decisive(runners)
        if i + 1 < SCENE:
            continue
        end = 2 * clock() - start - begun  # of another round
        are_enough = i + 1 >= steps.least
        is_known = are_enough and is_look(i + 1) and known(deciding)
        if _rank_zero_says(is_known or end > steps.latest or (are_enough and end > steps.seconds)):
            break


def everyone_first(runners: Sequence[T], i: int) -> list[T]:
    """In a round's order: everyone begins a round at times, and follows everyone."""
    first = i % len(runners)
    return [*runners[first:], *runners[:first]]


def is_look(rounds: int) -> bool:
    """Whether it is asked, after so many, how much is known."""
    return rounds in takewhile(lambda look: look <= rounds, _looks())


def _looks() -> Iterator[int]:
    look = FIRST_LOOK
    while True:
        yield look
        look += look // 4


def known(deciding: Sequence[Runner]) -> bool:
    """On rank 0 whether each of shardc's ratios to the peer is, by the slowest rank's steps; all ranks ask together."""
    slowest = {runner.name: _slowest(runner.steps) for runner in deciding}
    theirs = next(times for name, times in slowest.items() if not is_ours(name))
    ours = [times for name, times in slowest.items() if is_ours(name)]
    return dist.get_rank() == 0 and all(ratio(times, theirs).is_within(WITHIN) for times in ours)


def _slowest(steps: Mapping[int, Clock]) -> dict[int, float]:
    """For each round the seconds of the rank that took longest."""
    seconds = torch.tensor([step.seconds for step in steps.values()], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(steps, seconds.tolist(), strict=True))


def _decisive(runners: Sequence[Runner]) -> list[Runner]:
    """shardc, and the fastest peer by rank 0's clock."""
    peers = [i for i, runner in enumerate(runners) if runner.name != ONE_DEVICE and not is_ours(runner.name)]
    best = {i: min(step.seconds for step in runners[i].steps.values()) for i in peers}
    fastest = _rank_zero_says(min(peers, key=lambda i: best[i]))
    return [runner for i, runner in enumerate(runners) if i == fastest or is_ours(runner.name)]


def _rank_zero_says(number: int) -> int:
    """Its number, to all."""
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of medians, and of pairs: the median of each round's ratio, and the interval that holds it in 95 % of resamples.

    A round's steps are taken one after the other, so that the machine's speed hardly changes between the two.
    """

    medians: float
    paired: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.paired:.2f} ({self.low:.2f} to {self.high:.2f})"

    def is_within(self, part: float) -> bool:
        """Whether the interval reaches at most so far to either side, as a part of the ratio.

        It sees the interval's width and not on which side of 1 it lies, so that who stops by it chooses no answer.
        """
        return self.high - self.low <= 2 * part * self.paired


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio:
    """Of the rounds of both, with a bootstrap interval over them."""
    rounds, rng = sorted(ours.keys() & theirs.keys()), random.Random(0)
    pairs = [ours[i] / theirs[i] for i in rounds]
    of_medians = median(ours[i] for i in rounds) / median(theirs[i] for i in rounds)
    resampled = (median(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(of_medians, median(pairs), *_interval(resampled))


def ratio_apart(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of steps that were not taken in turn, where there are no pairs: of medians alone."""
    rng, of_medians = random.Random(0), median(ours) / median(theirs)
    both = ((rng.choices(ours, k=len(ours)), rng.choices(theirs, k=len(theirs))) for _ in range(RESAMPLES))
    return Ratio(of_medians, of_medians, *_interval(median(a) / median(b) for a, b in both))


def _interval(resampled: Iterable[float]) -> tuple[float, float]:
    """What 95 % of them lie in."""
    found = sorted(resampled)
    return found[RESAMPLES // 40], found[-RESAMPLES // 40 - 1]
