"""The pool: sets of decisions that are worth a mesh axis, found on a mesh of one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from shardc.search.decision import Decision
from shardc.search.plan import Axis, Cuts, Plan
from shardc.search.price import Price, Pricer
from shardc.search.task import Task

NUM_KEPT = 2  # sets that are best by one figure
LARGEST = 8  # ranks of the axis on which sets are compared

Prices = tuple[Price, ...]  # over links inside a node, and over links between nodes
Figure = Callable[[Prices], float]
FIGURES: tuple[Figure, ...] = (
    lambda prices: prices[0].seconds,
    lambda prices: prices[-1].seconds,
    lambda prices: prices[0].seconds * prices[0].peak,
)


@dataclass(eq=False)
class Pool:
    """Compares sets of decisions, all of them on one axis. ``prices``: of those that were compared."""

    pricer: Pricer
    task: Task
    given: tuple[tuple[str, object], ...] = ()
    prices: dict[Cuts, Prices | None] = field(default_factory=dict)

    def distinct(self, decisions: Iterable[Decision]) -> list[Decision]:
        """The decisions that change the program, one of those that make the same program of it."""
        nothing = self.price(frozenset())
        found: dict[object, Decision] = {}
        for decision in decisions:
            prices = self.price(frozenset({decision}))
            if prices is not None and prices != nothing:
                found.setdefault(prices, decision)
        return list(found.values())

    def sets(self, start: Cuts, decisions: Sequence[Decision]) -> list[Cuts]:
        """Sets around ``start``, the best by each figure first."""
        for figure in FIGURES:
            self._climb(start, decisions, figure)
        known = [(cuts, prices) for cuts, prices in self.prices.items() if prices and start <= cuts and cuts]
        best = [sorted(known, key=lambda each: (figure(each[1]), len(each[0])))[:NUM_KEPT] for figure in FIGURES]
        return list(dict.fromkeys(cuts for rank in zip(*best, strict=False) for cuts, _ in rank))

    def _climb(self, start: Cuts, decisions: Sequence[Decision], figure: Figure) -> None:
        """Add decisions in the order of what each gains alone, then drop those without which the figure is better."""
        order = sorted(decisions, key=lambda each: self._figure(start | {each}, figure))
        cuts, lowest = start, self._figure(start, figure)
        for decision in (*order, *order):
            other = cuts ^ {decision} if decision not in start else cuts
            value = self._figure(other, figure)
            if value < lowest:
                cuts, lowest = other, value

    def _figure(self, cuts: Cuts, figure: Figure) -> float:
        prices = self.price(cuts)
        return inf if prices is None else figure(prices)

    def price(self, cuts: Cuts) -> Prices | None:
        """The price of a set on one axis for two blocks; None where it cannot be compiled."""
        if cuts not in self.prices:
            size = min([LARGEST, self.task.devices, *(each.size for each in cuts)])
            plan = Plan((Axis("axis", size, cuts),))
            self.prices[cuts] = self.pricer.of_few(plan, self.task.extremes)
        return self.prices[cuts]
