"""The judgement of a suggestion: its price is that of its compile, and no plan that fits the same memory is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.language.text import bytes_text, seconds_text

from .plan import Plan, Price

TOLERANCE = 1e-6  # relative: costs of equal plans may be summed in another order


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its price on the machine of a line."""

    plan: Plan
    price: Price


def fastest(candidates: Sequence[Candidate], limit: float) -> Candidate | None:
    """The fastest plan whose peak is within the limit."""
    fitting = [each for each in candidates if each.price.peak <= limit]
    return min(fitting, key=lambda each: each.price.seconds, default=None)


def problems(said: Mapping[str, float], suggested: Price, others: Sequence[Candidate], limit: float) -> list[str]:
    """The problems of a suggestion, one sentence each.

    ``said``: its own ``seconds`` and ``peak``. ``suggested``: the price of the same plan compiled here. ``others``:
    plans that must not be faster if they fit into ``limit`` bytes.
    """
    found = []
    for name, value in said.items():
        own = getattr(suggested, name)
        if abs(value - own) > TOLERANCE * own:
            found.append(f"its {name} is {value:g}, and {own:g} when the plan is compiled")
    best = fastest(others, limit)
    if best is None:
        return found
    if suggested.peak > limit:
        more = bytes_text(round(suggested.peak - limit))
        return [*found, f"it takes {more} more than there is, where {best.plan.name} fits"]
    if best.price.seconds < suggested.seconds * (1 - TOLERANCE):
        ratio = suggested.seconds / best.price.seconds
        times = f"{seconds_text(suggested.seconds)} against {seconds_text(best.price.seconds)}"
        peak = bytes_text(best.price.peak)
        found.append(f"{best.plan.name} is {ratio:.4f} times as fast: {times}, {peak} a rank, with {best.plan.text}")
    return found
