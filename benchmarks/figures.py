"""The figures of a row, computed from the samples of all ranks, and the verdicts on shardc's promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from breakdown import Spent
from measure import Report
from ours import PLANS
from rounds import Ratio, ratio, ratio_apart
from row import ONE_DEVICE, Row, is_ours

TOLERANCE = 0.01  # relative error of the bytes counted on the wire
DRAW = 1.03  # the highest paired ratio that counts as a draw, if its interval contains 1
ENOUGH = 5  # rounds that a verdict needs


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one way to train in one row.

    ``seconds``: a step of the slowest rank. ``busy``: processor seconds of all ranks in a step, which other load on
    the machine hardly changes. ``wire``: bytes that a rank sends, the mean over ranks in the step with the fewest.
    ``multiple``: ``wire`` times ranks / (ranks - 1), in elements of the job's dtype per parameter (Psi).
    ``persistent`` and ``peak``: bytes of the fullest rank. ``loss_difference``: the largest to one device's loss.
    ``spent``: the time of rank 0 by kind of work. ``samples``: seconds of a step by round.
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
        """Whether this is one of shardc's ways."""
        return is_ours(self.name)


def figures(row: Row, ranks: Sequence[dict[str, Report]], device: Report | None = None) -> list[Figures]:
    """The figures of all ways to train in a row, from the reports of each rank; shardc is compared to the fastest peer.

    ``device``: the report of one device from an earlier row, if it takes no part in this one.
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
    """The ratio to one device: by rounds if one device takes part in this row, else of medians."""
    if row.with_device:
        return ratio(seconds, device)
    return ratio_apart(list(seconds.values()), list(device.values()))


def _slowest(reports: Sequence[Report]) -> dict[int, float]:
    """For each round, the seconds of the slowest rank."""
    return {i: max(report.steps[i].seconds for report in reports) for i in reports[0].steps}


def _difference(ranks: Sequence[Sequence[float]], device: Sequence[float]) -> float:
    """The largest difference of the ranks' mean loss from one device's; a rank that does not know the loss has NaN."""
    steps = zip(*(losses for losses in ranks if losses), strict=True)
    losses = [fmean(loss for loss in each if not math.isnan(loss)) for each in steps]
    return max(abs(a - b) for a, b in zip(losses, device, strict=False))


def is_fast(found: Ratio, limit: float) -> bool:
    """Whether the ratio of medians is within the limit; if the limit is 1, a draw by paired rounds counts as well."""
    return found.medians <= limit or (limit == 1.0 and found.paired <= DRAW and found.low <= 1.0)


def is_small(each: Figures) -> bool | None:
    """Whether the bytes counted on the wire are those announced and within the plan's bound; None if unknown.

    Headers and acknowledgements are counted too: a thousandth of large messages, a hundredth of small ones.
    Below ten megabytes there is no verdict.
    """
    if each.wire is None or each.announced is None or each.multiple is None or each.announced < 10**7:
        return None
    bound = PLANS[each.name].bound
    is_within = bound is None or each.multiple <= bound * (1 + TOLERANCE)
    return abs(each.wire / each.announced - 1) <= TOLERANCE and is_within


def is_held(each: Figures, limit: float) -> bool | None:
    """Whether shardc is within its limit of the best peer; None for a peer, and after too few rounds."""
    return is_fast(each.to_peer, limit) if each.to_peer and len(each.samples) >= ENOUGH else None


def verdicts(row: Row, everyone: Sequence[Figures], with_profile: bool = False) -> list[str]:
    """One line for each of shardc's ways in a row; if a peer is ahead or ``with_profile``, also the time by kind."""
    lines: list[str] = []
    for each in everyone:
        if each.to_peer is None or each.peer is None:
            continue
        lines += [f"{row.plan}, {row.title}: {each.name}: {_of_time(each, row.ways.limit)}{_of_wire(each)}"]
        if with_profile or is_held(each, row.ways.limit) is False:
            both = [peer for peer in everyone if peer.name == each.peer] + [each]
            lines += [f"  {one.name}, ms a step: {one.seconds * 1e3:.1f}; {one.spent}" for one in both]
    return lines


def _of_time(each: Figures, limit: float) -> str:
    assert each.to_peer is not None
    rounds = f"{each.to_peer} by {len(each.samples)} rounds"
    return (
        f"{each.to_peer.medians:.2f} of {each.peer}, paired {rounds}, at most {limit:.2f}: {word(is_held(each, limit))}"
    )


def _of_wire(each: Figures) -> str:
    is_good = is_small(each)
    if is_good is None or each.wire is None or each.announced is None:
        return ""
    bound = PLANS[each.name].bound
    limit = "" if bound is None else f", {each.multiple:.2f} Psi of {bound:.2f}"
    return f"; wire {each.wire / each.announced - 1:+.1%} of what is announced{limit}: {word(is_good)}"


def word(is_good: bool | None) -> str:
    """The verdict in words."""
    return "too few rounds" if is_good is None else "holds" if is_good else "does not"


def summary(found: Sequence[tuple[Row, Sequence[Figures]]]) -> str:
    """The number of verdicts that hold, and the rows whose verdicts do not."""
    ours = [(row, each) for row, everyone in found for each in everyone if each.is_ours]
    titles = [f"{row.plan} {row.title} ({each.name})" for row, each in ours]
    times = [is_held(each, row.ways.limit) for row, each in ours]
    return f"step time {_counted(titles, times)}\nwire {_counted(titles, [is_small(each) for _, each in ours])}"


def _counted(titles: Sequence[str], are_good: Sequence[bool | None]) -> str:
    """The number of known verdicts that are good, and the titles of the bad ones."""
    bad = [title for title, is_good in zip(titles, are_good, strict=True) if is_good is False]
    but = f"; does not: {', '.join(bad)}" if bad else ""
    return f"holds in {are_good.count(True)} of {len(are_good) - are_good.count(None)}{but}"
