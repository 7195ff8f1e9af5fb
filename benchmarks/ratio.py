"""The ratio of two ways' step times, with the interval that holds it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 2000


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
