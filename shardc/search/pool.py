"""The pool: sets of decisions that are worth a mesh axis, found on a mesh of one axis, or inside an axis of samples.

Decisions are compared one by one. If there are many, those of similar layers outside of the lists of blocks, such as
the stages of a network, are compared as one *group*. The search changes them one by one in its best plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

from shardc.search.found import WORTH
from shardc.search.pricing.price import Pricer, Prices
from shardc.search.space.decision import Decision
from shardc.search.space.meshes import cuts_well, least_factor
from shardc.search.space.plan import Axis, Cuts, Plan
from shardc.search.task import Task

NUM_KEPT = 2  # best sets to keep for each figure
NUM_POOL = 3  # sets with samples to try as a second axis, and sets to try in refinement
MOST = 10  # most groups that a climb adds and drops one by one
MANY = 20  # decisions; if there are more, they are compared in groups
LARGEST = 8  # most ranks of the axis on which sets are compared

Figure = Callable[[Prices], float]  # of the prices over links inside a node, and between nodes if there are any
FIGURES: tuple[Figure, ...] = (
    lambda prices: prices[0].seconds,
    lambda prices: prices[-1].seconds,
    lambda prices: prices[0].seconds * prices[0].peak,
)


@dataclass(eq=False)
class Pool:
    """Compares sets of decisions, each set on one axis of a mesh. ``prices``: those of the sets compared so far.

    ``beside``: the other axes of the mesh, outside of it.
    """

    pricer: Pricer
    task: Task
    beside: tuple[Axis, ...] = ()
    prices: dict[Cuts, Prices | None] = field(default_factory=dict)

    def groups(self, decisions: Iterable[Decision]) -> list[Cuts]:
        """The decisions that some axis can cut; if there are many, those of similar layers form one group."""
        return _groups([each for each in decisions if self._may_cut(each.size)])

    def distinct(self, start: Cuts, groups: Iterable[Cuts]) -> list[Cuts]:
        """The groups that change the price when they are added to ``start``, without duplicates.

        Two groups are duplicates if both together cost what each of them costs alone. Cuts of two similar layers are
        none: they cost the same one by one, but not together.
        """
        found: dict[Prices, list[Cuts]] = {}
        groups = list(groups)
        self._ahead([start, *(start | group for group in groups)])
        for group in groups:
            prices = self.price(start | group)
            if prices is not None and prices != self.price(start):
                alike = found.setdefault(prices, [])
                if all(self.price(start | group | other) != prices for other in alike):
                    alike.append(group)
        return [group for alike in found.values() for group in alike]

    def _may_cut(self, size: int) -> bool:
        """Whether some axis could cut a dim of this size."""
        return cuts_well(size, least_factor(self.task.devices))

    def foremost(self, start: Cuts, groups: Sequence[Cuts]) -> list[Cuts]:
        """The groups that gain most when added to ``start``, in time or in the product of time and memory."""
        orders = [self._by_gain(start, groups, figure) for figure in FIGURES]
        return list(dict.fromkeys(each for rank in zip(*orders, strict=True) for each in rank))[:MOST]

    def sets(self, start: Cuts, groups: Sequence[Cuts]) -> list[Cuts]:
        """Sets that contain ``start``, the best by each figure first.

        If cutting all parameters by rows, or all by columns, is better than the result of the climb from ``start``,
        a second climb begins there: a chain of layers may have to change as a whole.
        """
        most = start.union(*groups)
        for figure in FIGURES:
            lowest = self._climb(start, groups, figure)
            for together in (start | _along(most, 0), start | _along(most, 1)):
                if self._figure(together, figure) < lowest:
                    lowest = self._climb(start, groups, figure, together)
        known = [(cuts, prices) for cuts, prices in self.prices.items() if prices and start <= cuts <= most and cuts]
        best = [sorted(known, key=lambda each: (figure(each[1]), len(each[0])))[:NUM_KEPT] for figure in FIGURES]
        alone = [start] * bool(start and self.price(start))  # options may make it the best
        return list(dict.fromkeys((*alone, *(cuts for rank in zip(*best, strict=False) for cuts, _ in rank))))

    def _climb(self, start: Cuts, groups: Sequence[Cuts], figure: Figure, cuts: Cuts = frozenset()) -> float:
        """Toggle the groups in two passes, in the order of their gains alone, and keep each change that gains.

        ``cuts``: the set to begin with, by default ``start``, which stays in it. Returns the best figure.
        """
        order = self._by_gain(start, groups, figure)[:MOST]
        cuts = cuts or start
        lowest = self._figure(cuts, figure)
        turns = (*order, *order)
        for i, group in enumerate(turns):
            if toggled(cuts, group) not in self.prices:
                self._ahead([toggled(cuts, each) for each in turns[i : i + self.pricer.num_ahead]])
            value = self._figure(toggled(cuts, group), figure)
            if value < (1 - WORTH) * lowest:
                cuts, lowest = toggled(cuts, group), value
        return lowest

    def _by_gain(self, start: Cuts, groups: Iterable[Cuts], figure: Figure) -> list[Cuts]:
        """The groups in the order of their gains when each is added to ``start`` alone, the best first."""
        groups = list(groups)
        self._ahead([start | each for each in groups])
        return sorted(groups, key=lambda each: self._figure(start | each, figure))

    def _figure(self, cuts: Cuts, figure: Figure) -> float:
        prices = self.price(cuts)
        return inf if prices is None else figure(prices)

    def price(self, cuts: Cuts) -> Prices | None:
        """The prices of a set on one axis for one block; None if it cannot be compiled."""
        if cuts not in self.prices:
            self.prices[cuts] = self.pricer.of_few(self._plan(cuts), self.task.extremes)
        return self.prices[cuts]

    def _ahead(self, sets: Iterable[Cuts]) -> None:
        """Compile sets whose prices are asked for next, or may be."""
        self.pricer.ahead([self._plan(each) for each in sets if each not in self.prices], self.task.extremes, True)

    def _plan(self, cuts: Cuts) -> Plan:
        ranks = self.task.devices // prod(each.size for each in self.beside)
        size = min([LARGEST, ranks, *(each.size for each in cuts)])
        return Plan((*self.beside, Axis("axis", size, cuts)))


def toggled(cuts: Cuts, group: Cuts) -> Cuts:
    """The set without the group if it contains the group, else with it."""
    return cuts - group if group <= cuts else cuts | group


def one_by_one(cuts: Cuts) -> list[Cuts]:
    """Each decision of a set, as a set of its own, in the order of their names."""
    return [frozenset({each}) for each in in_order(cuts)]


def in_order(cuts: Cuts) -> list[Decision]:
    """The decisions of a set in the order of their names."""
    return sorted(cuts, key=str)


def _groups(decisions: Sequence[Decision]) -> list[Cuts]:
    """A group for each decision; if there are many, one for parameters whose names differ only in the first number."""
    groups: dict[object, list[Decision]] = {}
    for each in decisions:
        seed = each.seeds[0]
        alike = re.sub(r"\.\d+\.", ".*.", seed.pattern, count=1), seed.dim, each.kind
        is_grouped = len(decisions) > MANY and each.kind == "parameters"
        groups.setdefault(alike if is_grouped else each, []).append(each)
    return list(map(frozenset, groups.values()))


def _along(decisions: Iterable[Decision], dim: int) -> Cuts:
    """The decisions of parameters whose first seed is in this dim."""
    return frozenset(each for each in decisions if each.kind == "parameters" and each.seeds[0].dim == dim)
