"""Plans for little memory: sets of the pool with options, of which no other takes both less time and less memory.

The search for time goes on with the fastest sets on each mesh. The best plan that fits may have sets that are slower
without options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import inf

from shardc.search.found import Found, frontier
from shardc.search.pool import NUM_POOL
from shardc.search.search import GAIN, Search
from shardc.search.space.meshes import is_possible
from shardc.search.space.plan import Cuts, Plan

NUM_SHAPES = 3  # shapes of meshes of two axes that are tried, those of the best plans so far


def fit_in_memory(search: Search) -> None:
    """If memory is short: price the plans on meshes of one and two axes that no other beats in time and memory.

    They are compared on one block, and those that remain are priced for the whole model.
    """
    if not search.is_short:
        return
    best = frontier(each for each in _Space(search).priced() if search.task.permits(each.plan))
    search.prices(replace(each.plan, remat=remat) for each in best for remat in search.task.remats)
    search.tell("for little memory")


@dataclass(frozen=True, eq=False)
class _Space:
    """The plans that are tried where memory is short."""

    search: Search

    def priced(self) -> Iterator[Found]:
        """The plans with their prices for one block; with options unless a plan is far slower than one that fits."""
        most = self._most()
        plans = list(self.without_options())
        self._ahead(plans)
        fast = [each for plan in plans for each in self._of_one_block(plan) if each.price.seconds < most]
        further = {each.plan: [other for other in self.with_options(each.plan) if other != each.plan] for each in fast}
        self._ahead(chain.from_iterable(further.values()))
        for plan in plans:
            for each in (plan, *further.get(plan, ())):
                yield from self._of_one_block(each)

    def without_options(self) -> Iterator[Plan]:
        """Every set, and every pair of sets, on the shapes of the best plans; the best pairs where prices take long."""
        search = self.search
        alone: list[tuple[Cuts, ...]] = [(each,) for each in (*search.data, *search.model)]
        outer = (*search.data, *(search.model[:NUM_POOL] if search.task.is_for_memory else ()))
        pairs: list[tuple[Cuts, ...]] = list(product(outer, (*search.model, *search.data[:NUM_POOL])))
        for blank in search.blanks():
            chosen = search.best_pairs(pairs, self._shapes(2), blank) if search.pricer.whole else pairs
            for cuts in (*alone, *chosen):
                for shape in self._shapes(len(cuts)):
                    plan = replace(blank, axes=search.axes(shape, cuts))
                    if is_possible(plan.axes) and search.task.allows(plan.axes):
                        yield plan

    def _shapes(self, num_axes: int) -> list[tuple[int, ...]]:
        """The shapes with ``num_axes`` axes of the best plans so far."""
        best = (tuple(axis.size for axis in each.plan.axes) for each in self.search.best(len(self.search.found)))
        return list(dict.fromkeys(shape for shape in best if len(shape) == num_axes))[:NUM_SHAPES]

    def with_options(self, plan: Plan) -> Iterator[Plan]:
        """A plan without ZeRO and with each stage of it over each axis, both with and without recomputation."""
        zeros = self.search.zeros(plan, [axis.name for axis in plan.axes], self.search.stages)
        for zero, remat in product((None, *zeros), self.search.task.remats):
            yield replace(plan, zero=zero, remat=remat)

    def _most(self) -> float:
        """Seconds for one block from which on a plan without options is far slower than the best one that fits."""
        task, best = self.search.task, self.search.best()[0]
        if task.is_for_memory or best.price.peak > task.memory:
            return inf
        return min(each.price.seconds / GAIN for each in self._of_one_block(best.plan))

    def _ahead(self, plans: Iterable[Plan]) -> None:
        self.search.pricer.ahead(plans, (self.search.task.machine,), of_few=True)

    def _of_one_block(self, plan: Plan) -> list[Found]:
        """The plan with its price for one block; empty if it cannot be compiled."""
        prices = self.search.pricer.of_few(plan, (self.search.task.machine,))
        return [Found(plan, prices[0])] if prices else []
