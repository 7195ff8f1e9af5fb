"""Plans with their prices, and which of them are better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log

from shardc.search.pricing.price import Price
from shardc.search.space.plan import Plan
from shardc.search.task import Task

EQUAL = 1e-6  # figures that differ by less are equal
WORTH = 1e-4  # a change makes a figure better by this part at least


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and its price for the whole model."""

    plan: Plan
    price: Price

    def figure(self, task: Task) -> float:
        """What is to be small: its time, or its memory."""
        return task.figure(self.price.seconds, self.price.peak)

    def rank(self, task: Task) -> tuple[object, ...]:
        """A smaller rank is better: what fits, then the objective, the shortest plan, the other of time and memory."""
        excess = task.excess(self.price.peak)
        figure, other = self.figure(task), task.figure(self.price.peak, self.price.seconds)
        annotations = self.plan.annotations
        size = len(self.plan.options) + len(annotations), len(self.plan.axes)
        text = f"{annotations}"
        return excess, _rounded(figure), size, _rounded(other), len(text), f"{self.plan.mesh}", text

    def is_better(self, other: Found, task: Task) -> bool:
        """Whether it is worth a change: it fits and the other does not, or its figure is clearly less."""
        excess, excess_of_other = (task.excess(each.price.peak) for each in (self, other))
        if excess != excess_of_other:
            return excess < excess_of_other
        return self.figure(task) < (1 - WORTH) * other.figure(task)


def _rounded(figure: float) -> int:
    """A number that is the same for figures that are equal up to rounding, nearly always."""
    return floor(log(figure) / EQUAL) if figure > 0 else 0


def frontier(found: Iterable[Found]) -> list[Found]:
    """The plans that take less memory than every faster one."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.price.seconds, each.price.peak)):
        if not kept or each.price.peak < kept[-1].price.peak:
            kept.append(each)
    return kept
