"""A machine fitted to what was measured: of each link latency and bandwidth by least squares, of a device rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardc.collective import Kind
from shardc.device import Device
from shardc.link import Link, num_steps

LEAST = 1e-9  # seconds: nothing takes no time


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one kind over an axis of so many ranks, each of which sends so many bytes; seconds of each."""

    axis: str
    kind: Kind
    num_ranks: int
    wire_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """Calls that do so many operations on so many bytes, together; seconds of each time they were run.

    ``rate``: what they tell: ``flops`` of a ``dtype``, ``attention``, ``memory``, ``update``, or the shortest ``call``.
    """

    name: str
    rate: str
    flops: int
    nbytes: int
    seconds: tuple[float, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Beside:
    """A computation and a collective over an axis, each alone and then both at once; seconds of each time."""

    axis: str
    computing: tuple[float, ...]
    sending: tuple[float, ...]
    both: tuple[float, ...]


def fitted_link(sent: Sequence[Sent], beside: Sequence[Beside]) -> Link:
    """The latency and the bandwidth of one axis that come nearest to the medians, all of them in proportion.

    The equations ``steps * latency + bytes / bandwidth = seconds`` are divided by their seconds, so that a short
    collective counts as much as a long one.
    """
    rows = [(num_steps(each.kind, each.num_ranks), each.wire_bytes, _median(each.seconds)) for each in sent]
    scaled = [(steps / seconds, nbytes / seconds) for steps, nbytes, seconds in rows]
    latency, inverse = _least_squares(scaled)
    shares = [_overlap(each) for each in beside]
    return Link(latency, 1 / inverse, median(shares) if shares else 1.0, "the measured link")


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The ``x, y`` for which ``a x + b y`` is nearest to 1 in all rows ``(a, b)``, neither of them negative."""
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    x, y = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if x < 0:
        return 0.0, b / bb
    return (x, y) if y > 0 else (a / aa, LEAST / max(row[1] / row[0] for row in rows))


def _overlap(found: Beside) -> float:
    """For which part of the collective's time the computation went on."""
    computing, sending, both = map(_median, (found.computing, found.sending, found.both))
    return min(1.0, max(0.0, (computing + sending - both) / min(computing, sending)))


def fitted_device(computed: Sequence[Computed], name: str) -> Device:
    """Its rates: of each kind what all calls of it do, by the time that all take."""
    dtypes = dict.fromkeys(each.dtype for each in computed if each.rate == "flops")
    flops = {dtype: _rate(each for each in computed if (each.rate, each.dtype) == ("flops", dtype)) for dtype in dtypes}
    found: Mapping[str, list[Computed]] = {
        rate: [each for each in computed if each.rate == rate] for rate in ("attention", "memory", "update", "call")
    }
    return Device(
        flops,
        memory=_rate(found["memory"]),
        call=min(_median(each.seconds) for each in found["call"]),
        attention=_rate(found["attention"]) / flops["float32"],
        update=_rate(found["update"]),
        name=name,
    )


def _rate(found: Iterable[Computed]) -> float:
    """Operations a second, or bytes where there are none."""
    calls = list(found)
    return sum(each.flops or each.nbytes for each in calls) / sum(_median(each.seconds) for each in calls)


def _median(seconds: Sequence[float]) -> float:
    return max(LEAST, median(seconds))
