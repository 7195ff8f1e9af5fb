"""From the samples of all ranks to the figures of a row: medians, paired ratios, their intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from measure import Report
from row import Row

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians of paired samples, and the interval that holds it in 95 % of resamples of the pairs."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Figures:
    """One way to train in one row. Bytes are a rank's: of ``wire`` the mean, of memory the most.

    ``seconds``: of a step, of its slowest rank. ``busy``: computed by all ranks in a step; unlike seconds it hardly
    depends on what else the machine does. ``loss_difference``: the largest to one device's.
    """

    name: str
    seconds: float
    busy: float
    to_device: Ratio
    to_peer: Ratio | None
    first_seconds: float
    wire: float | None
    announced: int | None
    collectives: int
    persistent: int
    peak: int
    loss_difference: float
    samples: tuple[float, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it is shardc."""
        return self.name.startswith("shardc")


def figures(row: Row, ranks: Sequence[dict[str, Report]]) -> list[Figures]:
    """Those of everyone in a row, from each rank's reports. shardc is held against the fastest peer."""
    slowest = {name: _slowest([rank[name] for rank in ranks]) for name in row.names}
    peers = [name for name in row.names[1:] if not name.startswith("shardc")]
    best = min(peers, key=lambda name: median(slowest[name]), default=None)
    return [_of(row, name, ranks, slowest, None if name in peers else best) for name in row.names]


def _of(
    row: Row, name: str, ranks: Sequence[dict[str, Report]], slowest: dict[str, list[float]], peer: str | None
) -> Figures:
    reports, alone = [rank[name] for rank in ranks], row.names[0]
    device = ranks[0][alone].losses
    losses = (
        device if name == alone else [fmean(each) for each in zip(*(report.losses for report in reports), strict=True)]
    )
    wire = reports[0].wire
    return Figures(
        name,
        median(slowest[name]),
        median(sum(each) for each in zip(*(report.busy for report in reports), strict=True)),
        ratio(slowest[name], slowest[alone]),
        ratio(slowest[name], slowest[peer]) if peer and name != alone else None,
        max(report.first_seconds for report in reports),
        min(wire) / len(ranks) if wire else None,
        reports[0].announced,
        reports[0].collectives,
        max(report.persistent for report in reports),
        max(report.peak for report in reports),
        max(abs(a - b) for a, b in zip(losses, device, strict=True)),
        tuple(slowest[name]),
    )


def _slowest(reports: Sequence[Report]) -> list[float]:
    """For each step the seconds of the rank that took longest."""
    return [max(each) for each in zip(*(report.seconds for report in reports), strict=True)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of medians, with a bootstrap interval over pairs."""
    pairs, rng = list(zip(ours, theirs, strict=True)), random.Random(0)
    found = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(_ratio(pairs), found[RESAMPLES // 40], found[-RESAMPLES // 40])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(a for a, _ in pairs) / median(b for _, b in pairs)
