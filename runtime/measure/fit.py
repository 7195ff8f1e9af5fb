"""A machine fitted to what was measured: of each link latency and bandwidth by least squares, of a device rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardc.language.collective_kind import CollectiveKind, num_steps
from shardc.language.machine import Device, Link

LEAST = 1e-9  # seconds: nothing takes no time
ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one kind over an axis of so many ranks, each of which sends so many bytes; seconds of each."""

    axis: str
    kind: CollectiveKind
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
    """The latency and the bandwidth of one axis that come nearest to the medians, and those of each kind by itself."""
    kinds = dict.fromkeys(each.kind for each in sent)
    by_kind = tuple((kind, *_fitted([each for each in sent if each.kind == kind])) for kind in kinds)
    shares = [_overlap(each) for each in beside]
    return Link(*_fitted(sent), median(shares) if shares else 1.0, "the measured link", by_kind)


def _fitted(sent: Sequence[Sent]) -> tuple[float, float]:
    """Latency and bandwidth for which ``steps * latency + bytes / bandwidth`` is nearest to the seconds, in proportion.

    The squared differences are of equations divided by what the fit before gave, so that a short collective counts as
    much as a long one; divided by what was measured, one that took too long would count for less.
    """
    rows = [(num_steps(each.kind, each.num_ranks), each.wire_bytes, _median(each.seconds)) for each in sent]
    scales = [seconds for *_, seconds in rows]
    for _ in range(ITERATIONS):
        x, y = _least_squares([(a / s, b / s, t / s) for (a, b, t), s in zip(rows, scales, strict=True)])
        scales = [max(LEAST, a * x + b * y) for a, b, _ in rows]
    return x, 1 / y


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The ``x, y`` for which ``a x + b y`` is nearest to ``t`` in all rows ``(a, b, t)``, neither of them negative."""
    aa, ab, bb, at, bt = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = aa * bb - ab * ab
    x, y = (at * bb - bt * ab) / determinant, (aa * bt - ab * at) / determinant
    if x < 0:
        return 0.0, bt / bb
    return (x, y) if y > 0 else (at / aa, LEAST / max(row[1] for row in rows))


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
    """Operations a second, or bytes where there are none: of all calls of a round, which take as long as a step's.

    A short call is either held up by others or is not, and its median tells of neither.
    """
    calls = list(found)
    rounds = list(map(sum, zip(*(each.seconds for each in calls), strict=True)))
    return sum(each.flops or each.nbytes for each in calls) / _median(rounds)


def _median(seconds: Sequence[float]) -> float:
    return max(LEAST, median(seconds))
