"""From the samples of all ranks to the figures of a row: medians, paired ratios, their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from breakdown import Spent
from measure import Report
from ratio import Ratio, ratio, ratio_apart
from row import ONE_DEVICE, Row, is_ours


@dataclass(frozen=True, slots=True)
class Figures:
    """One way to train in one row. Bytes are a rank's: of ``wire`` the mean where it is least, of memory the most.

    ``seconds``: of a step, of its slowest rank. ``busy``: computed by all ranks in a step; unlike seconds it hardly
    depends on what else the machine does. ``multiple``: ``wire`` times ranks / (ranks - 1), in float32 elements a
    parameter (Psi), or elements of the job's dtype. ``loss_difference``: the largest to one device's. ``samples``: a
    step's seconds by round. ``spent``: on rank 0.
    """

    name: str
    seconds: float
    busy: float
    to_device: Ratio
    peer: str | None
    to_peer: Ratio | None
    first_seconds: float
    wire: float | None
    announced: int | None
    multiple: float | None
    collectives: int
    persistent: int
    peak: int
    loss_difference: float
    spent: Spent
    samples: dict[int, float]

    @property
    def is_ours(self) -> bool:
        """Whether it is shardc."""
        return is_ours(self.name)


def figures(row: Row, ranks: Sequence[dict[str, Report]], device: Report | None = None) -> list[Figures]:
    """Those of everyone in a row, from each rank's reports. shardc is held against the fastest peer.

    ``device``: that of one device in an earlier row, where it takes no part in this one.
    """
    ranks = [{ONE_DEVICE: device, **rank} if device else rank for rank in ranks]
    slowest = {name: _slowest([rank[name] for rank in ranks]) for name in {ONE_DEVICE, *row.names}}
    most = max(len(slowest[name]) for name in row.names)
    peers = [name for name in row.peers if len(slowest[name]) == most]
    best = min(peers, key=lambda name: median(slowest[name].values()))
    return [_of(row, name, ranks, slowest, best if is_ours(name) else None) for name in row.names]


def _of(
    row: Row, name: str, ranks: Sequence[dict[str, Report]], slowest: dict[str, dict[int, float]], peer: str | None
) -> Figures:
    reports, device = [rank[name] for rank in ranks], ranks[0][ONE_DEVICE]
    wire = min(reports[0].wire) / len(ranks) if reports[0].wire else None
    size = device.parameters * row.job.dtype.itemsize
    return Figures(
        name,
        median(slowest[name].values()),
        median(sum(report.steps[i].busy for report in reports) for i in reports[0].steps),
        _to_device(row, slowest[name], slowest[ONE_DEVICE]),
        peer,
        ratio(slowest[name], slowest[peer]) if peer else None,
        max(report.first_seconds for report in reports),
        wire,
        reports[0].announced,
        wire / size * len(ranks) / (len(ranks) - 1) if wire is not None else None,
        reports[0].collectives,
        max(report.persistent for report in reports),
        max(report.peak for report in reports),
        _difference([report.losses for report in reports], device.losses),
        reports[0].spent,
        slowest[name],
    )


def _to_device(row: Row, seconds: dict[int, float], device: dict[int, float]) -> Ratio:
    """Of rounds where one device takes part in them."""
    if row.with_device:
        return ratio(seconds, device)
    return ratio_apart(list(seconds.values()), list(device.values()))


def _slowest(reports: Sequence[Report]) -> dict[int, float]:
    """For each round the seconds of the rank that took longest."""
    return {i: max(report.steps[i].seconds for report in reports) for i in reports[0].steps}


def _difference(ranks: Sequence[Sequence[float]], device: Sequence[float]) -> float:
    """The largest between the mean loss of those who know it and one device's, over the steps of both."""
    steps = zip(*(losses for losses in ranks if losses), strict=True)
    losses = [fmean(loss for loss in each if not math.isnan(loss)) for each in steps]
    return max(abs(a - b) for a, b in zip(losses, device, strict=False))
