"""Plans with their prices, and the order of preference among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import floor, inf, log
from typing import TypeVar

from shardc.search.pricing.price import Price
from shardc.search.space.plan import Plan
from shardc.search.task import Task

T = TypeVar("T")
EQUAL = 1e-6  # relative difference below which two figures count as equal
WORTH = 1e-4  # relative gain that makes a change worthwhile


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and its price for the whole model."""

    plan: Plan
    price: Price

    def figure(self, task: Task) -> float:
        """The figure that the task minimizes: the plan's time or its memory."""
        return task.figure(self.price.seconds, self.price.peak)

    def rank(self, task: Task) -> tuple[object, ...]:
        """A sort key, best plan first: excess over the memory, the objective, length of the plan, the other figure.

        If the objective is memory, time comes before length: many plans need the least memory.
        """
        excess = task.excess(self.price.peak)
        figure, other = self.figure(task), task.figure(self.price.peak, self.price.seconds)
        annotations = self.plan.annotations
        size = len(self.plan.options) + len(annotations), len(self.plan.axes)
        text = f"{annotations}"
        further = (_rounded(other), size) if task.is_for_memory else (size, _rounded(other))
        return excess, _rounded(figure), *further, len(text), f"{self.plan.mesh}", text

    def is_better(self, other: Found, task: Task, worth: float = WORTH) -> bool:
        """Whether it exceeds the memory by less than the other or, at equal excess, has a clearly smaller figure.

        ``worth``: the relative gain from which on the figure is clearly smaller.
        """
        excess, excess_of_other = (task.excess(each.price.peak) for each in (self, other))
        if excess != excess_of_other:
            return excess < excess_of_other
        return self.figure(task) < (1 - worth) * other.figure(task)


def seconds_at(memory: float, smaller: Found, larger: Found) -> float:
    """Seconds of a plan between two others, with a peak of ``memory``, if time falls evenly as the peak grows.

    Those of the larger if it fits; infinite if the smaller does not.
    """
    if larger.price.peak <= memory:
        return larger.price.seconds
    if smaller.price.peak > memory:
        return inf
    part = (memory - smaller.price.peak) / (larger.price.peak - smaller.price.peak)
    return smaller.price.seconds + part * (larger.price.seconds - smaller.price.seconds)


def _rounded(figure: float) -> int:
    """A whole number that is nearly always the same for figures that are equal up to rounding."""
    return floor(log(figure) / EQUAL) if figure > 0 else 0


def first_of_each(plans: Iterable[T], kind: Callable[[T], object]) -> list[T]:
    """The first plan of each kind, in their order."""
    first: dict[object, T] = {}
    for plan in plans:
        first.setdefault(kind(plan), plan)
    return list(first.values())


def frontier(found: Iterable[Found]) -> list[Found]:
    """The Pareto frontier: the plans that take less memory than every faster plan, the fastest first."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.price.seconds, each.price.peak)):
        if not kept or each.price.peak < kept[-1].price.peak:
            kept.append(each)
    return kept
