"""Refinement: change one thing of a good plan at a time, until no change makes it better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, permutations, product

from shardc.options import Zero
from shardc.search.found import WORTH, Found, first_of_each
from shardc.search.pool import NUM_POOL, in_order, toggled
from shardc.search.search import Search
from shardc.search.space.meshes import is_possible, least_factor
from shardc.search.space.plan import Axis, Cuts, Plan

NUM_REFINED, NUM_REFINED_SLOWLY = 3, 2  # meshes whose best plans are refined; fewer where prices take long
NUM_BEYOND = 4  # plans that do not fit and are changed if memory is short
WORTH_A_ROUND = 1e-3  # relative gain of a round that makes another one worthwhile where prices take long
CLEARLY = 1.05  # tolerance, since one block hides less communication than several do

Move = Callable[[Plan], Iterator[Plan]]  # yields a plan with one thing changed


def refine(search: Search) -> None:
    """Refine the best plans of the best meshes that a search has found.

    If memory is short, plans that do not fit are changed too, unless each price takes a compilation of the whole model.
    """
    # One plan for each mesh: other options are among its changes.
    of_meshes = first_of_each(search.best(len(search.found)), lambda found: str(found.plan.mesh))
    refinement = _Refinement(search)
    for each in of_meshes[: NUM_REFINED_SLOWLY if search.pricer.longer else NUM_REFINED]:
        refinement.run(each, refinement.moves(each.plan))
    is_thorough = search.is_short and search.pricer.whole is None
    if is_thorough and not search.task.is_for_memory:
        refinement.beyond_memory()
    for each in search.best(NUM_REFINED if is_thorough else 1):
        refinement.run(each, refinement.single(each.plan), clearly=1.0)
    search.prices(
        replace(each.plan, remat=None) for each in search.recomputing()
    )  # for an estimate of the time with less recomputation
    search.tell("refined")


@dataclass(frozen=True, eq=False)
class _Refinement:
    """Refines the plans of a search."""

    search: Search

    def run(self, start: Found, moves: Sequence[Move], clearly: float = CLEARLY) -> None:
        """Apply the moves in turn to the best plan so far, in rounds, until a round is not worthwhile.

        ``clearly``: a plan that is slower for one block by more than this factor is not priced for all blocks. If each
        price takes a compilation of the whole model, the plan must not be slower for one block, or has to be faster if
        memory is ample, and a round has to gain more to be followed by another one.
        """
        most = 1 - WORTH if self.search.has_plenty(start.plan) else 1.0
        clearly, worth = (clearly, WORTH) if self.search.pricer.longer else (most, WORTH_A_ROUND)
        best, before, changed = start, None, None
        while before is None or best.is_better(before, self.search.task, worth):
            before, compiled = best, 0
            for i, move in enumerate(moves):
                if best.plan != changed or i == compiled:
                    compiled = i + self.search.pricer.num_ahead
                    self._ahead(moves[i:compiled], best.plan, clearly)
                changed = best.plan
                for plan in move(changed):
                    found = self.search.price(plan, changed, clearly)
                    if found is not None and found.is_better(best, self.search.task):
                        best = found

    def _ahead(self, moves: Sequence[Move], plan: Plan, clearly: float) -> None:
        """Compile the first plan of each move; whether there are others depends on its price."""
        first = (next(move(plan), None) for move in moves)
        self.search.ahead([each for each in first if each is not None], plan, clearly)

    def beyond_memory(self) -> None:
        """Apply the moves to plans that do not fit but are faster than the best that does: a move may make them fit.

        Of those on the frontier of time and memory, the smallest is next that was not tried.
        """
        search, tried = self.search, set[Plan]()
        for _ in range(NUM_BEYOND):
            best = search.best()[0]
            larger = [each for each in search.frontier() if best.is_better(each, search.task, 0.0)]
            untried = [each.plan for each in larger if each.plan not in tried]
            if not untried:
                return
            plan = untried[-1]
            tried.add(plan)
            for move in self.moves(plan):
                for changed in move(plan):
                    search.price(changed, plan, clearly=1.0)

    def moves(self, plan: Plan) -> list[Move]:
        """The moves that add or drop a group on an axis, or take other cuts or sizes of axes, or another ``Zero``."""
        axes = range(len(plan.axes))
        more_or_less = [partial(self._with_group, i, each) for i in axes for each in self.search.changes]
        with_other_cuts = [partial(self._with_other_cuts, i) for i in axes]
        return [*more_or_less, *with_other_cuts, self._with_other_sizes, self._with_other_zero]

    def single(self, plan: Plan) -> list[Move]:
        """The moves that add or drop one annotation, at any seed of any decision, or take another ``Zero``."""
        places = [frozenset({each}) for decision in self.search.decisions for each in decision.by_seed()]
        one = [partial(self._with_group, i, each) for i in range(len(plan.axes)) for each in places]
        return [*one, self._with_other_zero]

    def _with_group(self, i: int, group: Cuts, plan: Plan) -> Iterator[Plan]:
        return self._with_cuts(plan, i, toggled(plan.axes[i].cuts, group))

    def _with_other_cuts(self, i: int, plan: Plan) -> Iterator[Plan]:
        """Cut another dim of inputs, take a set of the pool, swap rows and columns, or reorder positions."""
        axis = plan.axes[i]
        inputs = frozenset(each for each in chain(*self.search.changes) if each.kind in ("samples", "inputs"))
        swaps = product(in_order(inputs & axis.cuts), in_order(inputs - axis.cuts))
        swapped = [axis.cuts - {mine} | {other} for mine, other in swaps]
        pool = self.search.data if axis.cuts_samples else self.search.model
        for cuts in dict.fromkeys((*swapped, *pool[:NUM_POOL])):
            yield from self._with_cuts(plan, i, cuts)
        if sum(each.kind == "parameters" for each in axis.cuts) > 1:
            yield self._with_axis(plan, i, replace(axis, is_by_rows=not axis.is_by_rows))
        if axis.cuts_positions:
            yield self._with_axis(plan, i, replace(axis, in_zigzag=not axis.in_zigzag))

    def _with_other_sizes(self, plan: Plan) -> Iterator[Plan]:
        """Make one axis smaller by its least factor, and another one larger."""
        for i, j in permutations(range(len(plan.axes)), 2):
            size, factor = plan.axes[i].size, least_factor(plan.axes[i].size)
            if factor < size:
                smaller = self._with_axis(plan, i, replace(plan.axes[i], size=size // factor))
                yield self._with_axis(smaller, j, replace(smaller.axes[j], size=smaller.axes[j].size * factor))

    def _with_other_zero(self, plan: Plan) -> Iterator[Plan]:
        zeros = self.search.zeros(plan, [axis.name for axis in plan.axes], self.search.task.stages)
        yield from (replace(plan, zero=zero) for zero in (None, *zeros))

    def _with_cuts(self, plan: Plan, i: int, cuts: Cuts) -> Iterator[Plan]:
        """The plan with other cuts of an axis; if some are dropped, also with ZeRO 3 over the axis in their place."""
        changed = self._with_axis(plan, i, replace(plan.axes[i], cuts=cuts))
        if not is_possible(changed.axes):
            return
        yield changed
        if plan.zero is None and plan.axes[i].cuts - cuts and 3 in self.search.task.stages:
            stored = replace(changed, zero=Zero(changed.axes[i].name, 3))
            if not self.search.is_worse(stored, changed, 1.0, self.search.has_plenty(plan)):
                yield stored

    def _with_axis(self, plan: Plan, i: int, axis: Axis) -> Plan:
        """The plan with another axis in place of its ``i``-th; axes are renamed after their new cuts."""
        axes = (*plan.axes[:i], axis, *plan.axes[i + 1 :])
        sizes, cuts = [each.size for each in axes], [each.cuts for each in axes]
        named = self.search.axes(sizes, cuts, [each.name for each in axes])
        zero = plan.zero and plan.zero.renamed({old.name: new.name for old, new in zip(plan.axes, named, strict=True)})
        pairs = zip(axes, named, strict=True)
        axes = tuple(replace(each, name=new.name, has_samples=new.has_samples) for each, new in pairs)
        return replace(plan, axes=axes, zero=zero, written=None)
