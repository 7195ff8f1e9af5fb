"""Fits a machine to measurements: latency and bandwidth of each link by least squares, and rates of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardc.language.collective_kind import CollectiveKind, num_steps
from shardc.language.machine import Device, Link

LEAST = 1e-9  # seconds, the shortest time of anything
ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Measured collectives of one kind over an axis, of which each rank sends ``wire_bytes``; ``seconds`` by round."""

    axis: str
    kind: CollectiveKind
    num_ranks: int
    wire_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """Measured calls of so many operations on so many bytes in all; ``seconds`` by round.

    ``rate``: the rate that they measure: ``flops`` of a ``dtype``, ``attention``, ``memory``, ``update``, or the
    shortest ``call``.
    """

    name: str
    rate: str
    flops: int
    nbytes: int
    seconds: tuple[float, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Beside:
    """A computation and a collective over an axis, each alone and both at once; seconds by round."""

    axis: str
    computing: tuple[float, ...]
    sending: tuple[float, ...]
    both: tuple[float, ...]


def fitted_link(sent: Sequence[Sent], beside: Sequence[Beside]) -> Link:
    """The latency and bandwidth of an axis that fit the median times best, for all collectives and for each kind."""
    kinds = dict.fromkeys(each.kind for each in sent)
    by_kind = tuple((kind, *_fitted([each for each in sent if each.kind == kind])) for kind in kinds)
    shares = []  # of the collective's time, the part during which the computation went on
    for each in beside:
        computing, sending, both = map(_median, (each.computing, each.sending, each.both))
        shares.append(min(1.0, max(0.0, (computing + sending - both) / min(computing, sending))))
    return Link(*_fitted(sent), median(shares) if shares else 1.0, "the measured link", by_kind)


def _fitted(sent: Sequence[Sent]) -> tuple[float, float]:
    """Latency and bandwidth for which ``steps * latency + bytes / bandwidth`` fits the seconds best, in proportion.

    Each equation is divided by the time that the previous iteration fitted, so that a short collective counts as much
    as a long one. Divided by the measured time, a collective that took too long would count for less.
    """
    rows = [(num_steps(each.kind, each.num_ranks), each.wire_bytes, _median(each.seconds)) for each in sent]
    scales = [seconds for *_, seconds in rows]
    for _ in range(ITERATIONS):
        x, y = _least_squares([(a / s, b / s, t / s) for (a, b, t), s in zip(rows, scales, strict=True)])
        scales = [max(LEAST, a * x + b * y) for a, b, _ in rows]
    return x, 1 / y


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The nonnegative ``x, y`` for which ``a x + b y`` is nearest to ``t`` over all rows ``(a, b, t)``.

    In Python floats, which give the same bits on every rank; those of ``torch.linalg.lstsq`` depend on how memory is
    aligned.
    """
    aa, ab, bb, at, bt = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = aa * bb - ab * ab
    x, y = (at * bb - bt * ab) / determinant, (aa * bt - ab * at) / determinant
    if x < 0:
        return 0.0, bt / bb
    return (x, y) if y > 0 else (at / aa, LEAST / max(row[1] for row in rows))


def fitted_device(computed: Sequence[Computed], name: str) -> Device:
    """A device whose rates are the work of all calls of a kind divided by the time of all."""
    dtypes = dict.fromkeys(each.dtype for each in computed if each.rate == "flops")
    flops = {dtype: _rate(each for each in computed if (each.rate, each.dtype) == ("flops", dtype)) for dtype in dtypes}
    by_rate: Mapping[str, list[Computed]] = {
        rate: [each for each in computed if each.rate == rate] for rate in ("attention", "memory", "update", "call")
    }
    return Device(
        flops,
        memory=_rate(by_rate["memory"]),
        call=min(_median(each.seconds) for each in by_rate["call"]),
        attention=_rate(by_rate["attention"]) / flops["float32"],
        update=_rate(by_rate["update"]),
        name=name,
    )


def _rate(computed: Iterable[Computed]) -> float:
    """Operations a second, or bytes if there are none, by the median time of a round of all calls.

    The median of a single short call would not show how often other load delays it.
    """
    calls = list(computed)
    rounds = list(map(sum, zip(*(each.seconds for each in calls), strict=True)))
    return sum(each.flops or each.nbytes for each in calls) / _median(rounds)


def _median(seconds: Sequence[float]) -> float:
    return max(LEAST, median(seconds))
