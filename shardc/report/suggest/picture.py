"""The picture of candidates: peak memory against the time of a step, the frontier of the two, and the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from shardc.language.text import bytes_text, printable, seconds_text
from shardc.report.suggest.records import Candidate, Suggested, SuggestionEntry, mesh_text, options_text

WIDTH, HEIGHT = 980, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 18, 46  # margins
FAR = 4.0  # the limit is drawn if it is within this factor of the lowest and the highest peak


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale from ``low`` to ``high`` along pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        part = log10(value / self.low) / log10(self.high / self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values: 1, 2 and 5 times powers of ten, or equal steps if these are too few."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        found = [each for each in found if self.low <= each <= self.high]
        if len(found) > 8:
            found = [each for each in found if log10(each) == round(log10(each))]
        if len(found) >= 3:
            return found
        step = 10.0 ** floor(log10(self.high - self.low))
        step = next(step / each for each in (1, 2, 5, 10) if (self.high - self.low) / step * each >= 3)
        return [each * step for each in range(ceil(self.low / step), floor(self.high / step) + 1)]


def scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale with some room around the positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    room = max(1.02, (high / low) ** 0.06)
    return Scale(low / room, high * room, start, end)


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The plans for which no other is both faster and smaller, the fastest first."""
    found: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.seconds, each.peak)):
        if not found or each.peak < found[-1].peak:
            found.append(each)
    return found


def picture(suggested: Suggested) -> str:
    """The SVG element."""
    candidates = [each for each in suggested.candidates if each.seconds > 0 and each.peak > 0]
    plans = [each for each in suggested.suggestions if each.seconds.step > 0 and each.memory.peak > 0]
    peaks = [*(float(each.peak) for each in candidates), *(float(each.memory.peak) for each in plans)]
    limit = suggested.memory
    is_near = limit is not None and min(peaks, default=0) / FAR <= limit <= FAR * max(peaks, default=0)
    times = [*(each.seconds for each in candidates), *(each.seconds.step for each in plans)]
    x = scale(times, LEFT, WIDTH - RIGHT)
    y = scale([*peaks, *([float(limit)] if limit is not None and is_near else [])], HEIGHT - BOTTOM, TOP)
    parts = [
        *_axes(x, y),
        *(_dot(each, x, y, limit) for each in candidates),
        _line(frontier(candidates), x, y),
        *(_limit(limit, y) if limit is not None and is_near else ()),
        *(_number(i, each, x, y) for i, each in reversed([*enumerate(plans, 1)])),
    ]
    label = f"{len(candidates)} plans: peak memory against the time of a step"
    return (
        f'<svg class="candidates" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "\n".join(parts)
        + "</svg>"
    )


def _axes(x: Scale, y: Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    found = [
        f'<path class="axis-line" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">predicted time of a step</text>',
        f'<text x="{LEFT}" y="{TOP - 6}" text-anchor="end">peak</text>',
    ]
    for value in x.ticks():
        found.append(f'<path class="tick" d="M{x.at(value)} {TOP}V{bottom}"/>')
        found.append(f'<text x="{x.at(value)}" y="{bottom + 16}" text-anchor="middle">{seconds_text(value)}</text>')
    for value in y.ticks():
        found.append(f'<path class="tick" d="M{LEFT} {y.at(value)}H{right}"/>')
        label = _rounded(value, bytes_text)
        found.append(f'<text x="{LEFT - 8}" y="{y.at(value) + 4}" text-anchor="end">{label}</text>')
    return found


def _rounded(value: float, text: Callable[[float], str]) -> str:
    return text(round(value))


def _dot(candidate: Candidate, x: Scale, y: Scale, limit: int | None) -> str:
    excess = "" if limit is None or candidate.peak <= limit else " excess"
    title = _title(candidate.text, candidate.seconds, candidate.peak)
    place = f'cx="{x.at(candidate.seconds)}" cy="{y.at(candidate.peak)}"'
    return f'<circle class="candidate{excess}" {place} r="4">{title}</circle>'


def _line(plans: Sequence[Candidate], x: Scale, y: Scale) -> str:
    """The frontier as steps: from each plan right to the time of the next one, and down to its peak."""
    if not plans:
        return ""
    first, *others = plans
    path = f"M{x.at(first.seconds)} {y.at(first.peak)}"
    path += "".join(f"H{x.at(each.seconds)}V{y.at(each.peak)}" for each in others)
    return f'<path class="frontier" d="{path}"/>'


def _limit(limit: int, y: Scale) -> Iterable[str]:
    height = y.at(limit)
    yield f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>'
    words = f"{bytes_text(limit)} a rank"
    yield f'<text class="limit-name" x="{WIDTH - RIGHT}" y="{height - 5}" text-anchor="end">{words}</text>'


def _number(number: int, plan: SuggestionEntry, x: Scale, y: Scale) -> str:
    left, top = x.at(plan.seconds.step), y.at(plan.memory.peak)
    words = ", ".join(filter(None, (mesh_text(plan), options_text(plan))))
    return (
        f'<a class="suggestion" href="#plan-{number}"><circle cx="{left}" cy="{top}" r="9"/>'
        f'<text x="{left}" y="{top + 4}" text-anchor="middle">{number}</text>'
        f"{_title(words, plan.seconds.step, plan.memory.peak)}</a>"
    )


def _title(words: str, seconds: float, peak: int) -> str:
    """The tooltip: mesh, options, time and memory."""
    return f"<title>{escape(printable(f'{words}: {seconds_text(seconds)} a step, {bytes_text(peak)} a rank'))}</title>"
