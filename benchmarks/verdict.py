"""Whether what was measured is what was promised: step time beside the best peer, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from figures import Figures
from ours import PLANS
from ratio import Ratio
from row import Row

TOLERANCE = 0.01  # of bytes counted on the wire
DRAW = 1.03  # as high may a paired ratio be whose interval holds 1
ENOUGH = 5  # rounds; of fewer nothing is said


def is_fast(found: Ratio, limit: float) -> bool:
    """Whether the ratio of medians is within a limit; where that is 1, a draw by rounds counts too."""
    return found.medians <= limit or (limit == 1.0 and found.paired <= DRAW and found.low <= 1.0)


def is_small(each: Figures) -> bool | None:
    """Whether the bytes counted are those announced, and within the plan's bound; None where no one counts them.

    Headers and acknowledgements count too, a thousandth where messages are large, a hundredth where they are small:
    nothing is said of less than ten megabytes.
    """
    if each.wire is None or each.announced is None or each.multiple is None or each.announced < 10**7:
        return None
    bound = PLANS[each.name].bound
    is_within = bound is None or each.multiple <= bound * (1 + TOLERANCE)
    return abs(each.wire / each.announced - 1) <= TOLERANCE and is_within


def is_held(each: Figures, limit: float) -> bool | None:
    """Whether shardc is as fast as it should be; None for a peer, and after too few rounds."""
    return is_fast(each.to_peer, limit) if each.to_peer and len(each.samples) >= ENOUGH else None


def verdicts(row: Row, everyone: Sequence[Figures], with_profile: bool = False) -> list[str]:
    """A line for each of shardc's in a row; where a peer is ahead, or if asked for, where both spend their time."""
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
    """How it is said."""
    return "too few rounds" if is_good is None else "holds" if is_good else "does not"


def summary(found: Sequence[tuple[Row, Sequence[Figures]]]) -> str:
    """How many hold, and which do not."""
    ours = [(row, each) for row, everyone in found for each in everyone if each.is_ours]
    titles = [f"{row.plan} {row.title} ({each.name})" for row, each in ours]
    times = [is_held(each, row.ways.limit) for row, each in ours]
    return f"step time {_counted(titles, times)}\nwire {_counted(titles, [is_small(each) for _, each in ours])}"


def _counted(titles: Sequence[str], are_good: Sequence[bool | None]) -> str:
    """How many of those of which something is said."""
    bad = [title for title, is_good in zip(titles, are_good, strict=True) if is_good is False]
    but = f"; does not: {', '.join(bad)}" if bad else ""
    return f"holds in {are_good.count(True)} of {len(are_good) - are_good.count(None)}{but}"
