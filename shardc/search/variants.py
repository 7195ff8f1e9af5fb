"""Variants of plans that were compiled whole: choices that need the whole model, and ways to fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from math import inf

from shardc.options import AUTO, Remat, Zero
from shardc.options.zero import HOST, OPTIMIZER, PARAMETERS
from shardc.search.found import first_of_each, seconds_at
from shardc.search.pricing.price import Pricer
from shardc.search.pricing.whole import WholePlans
from shardc.search.space.plan import Plan

NUM_RECOMPUTED = 4  # best plans that recompute all blocks and are tried with less recomputation
NUM_BUDGETS = 4  # budgets of saved bytes to try until a plan fits
NUM_RINGED, CLEARLY = 3, 0.99  # best plans that are tried with rings, if these take less than this fraction of the time
LONG = 0.05  # part of a step in which a rank waits for copies, from which on ``offload`` is tried too
NUM_OFFLOADED = 3  # plans that do not fit and are tried with parts in host memory


def compile_variants(whole: WholePlans, pricer: Pricer) -> None:
    """Compile variants that may be better than the best plan: ways to fit, the least changes first, then rings."""
    blocks = pricer.blocks
    whole.compile(reordered(whole))
    _compute_or_save(whole, blocks)
    if whole.task.is_for_memory or _needs_host(whole):
        whole.compile(offloaded(whole))
        whole.compile(reordered(whole))
        _compute_or_save(whole, blocks)
    whole.compile(in_rings(whole, pricer))


def _needs_host(whole: WholePlans) -> bool:
    """Whether the best plan does not fit, or waits long for what it saves in host memory."""
    best = whole.ranked()[0]
    cost, copying = whole.costs[best], whole.costs[best].copying
    return not whole.fits(best) or (copying is not None and (copying.waited or 0) > LONG * cost.seconds)


def _compute_or_save(whole: WholePlans, blocks: str | None) -> None:
    recomputed = [plan for plan in whole.ranked() if plan.remat is not None and plan.remat.budget is None]
    for plan in recomputed[:NUM_RECOMPUTED]:
        recompute_less(whole, plan)
    whole.compile(saved_otherwise(whole, blocks))


def reordered(whole: WholePlans) -> Iterator[Plan]:
    """The best plan with other axes across nodes, or with the schedule that is best for its stages."""
    best, task = whole.ranked()[0], whole.task
    if task.machine.between is not None and best.pipeline is None:
        yield from (replace(best, axes=axes) for axes in permutations(best.axes) if axes != best.axes)
    if best.pipeline is not None and task.pipelines is None:
        yield replace(best, pipeline=replace(best.pipeline, schedule="auto"))


def recompute_less(whole: WholePlans, plan: Plan) -> None:
    """For a plan that recomputes all of its blocks: compile variants that save as much as there is memory for.

    The rest of the peak changes with what is saved, so several budgets are tried, each smaller than the one before,
    until a variant fits or is too slow.
    """
    memory, less = whole.task.memory, replace(plan, remat=None)
    if memory == inf or not whole.task.may_recompute:
        return
    whole.compile([less])
    if less not in whole.costs or not _may_be_best(whole, plan, less):
        return
    budget = whole.costs[less].memory["saved"]
    for _ in range(NUM_BUDGETS):
        if less not in whole.costs or whole.fits(less) or not whole.may_surpass(less):
            return
        budget -= whole.costs[less].memory["peak"] - int(memory)
        if budget <= 0:
            return
        less = replace(plan, remat=Remat(budget=budget))
        whole.compile([less])


def _may_be_best(whole: WholePlans, plan: Plan, less: Plan) -> bool:
    """Whether a plan that recomputes as little as there is memory for would be the best, by its two extremes."""
    best = whole.ranked()[0]
    seconds = seconds_at(whole.task.memory, whole.found(plan), whole.found(less))
    return not whole.fits(best) or seconds < whole.costs[best].seconds


def saved_otherwise(whole: WholePlans, blocks: str | None) -> Iterator[Plan]:
    """If memory is to be saved: the best plan with the values that blocks save in pieces, in host memory, or both.

    Pieces are cut over an axis that does not cut the batch. Host memory replaces recomputation; if the best plan does
    not fit, both are tried together as well.
    """
    best, task = whole.ranked()[0], whole.task
    fits = whole.fits(best) and not task.is_for_memory
    yield from (replace(best, saved=saved) for saved in task.saved or ())
    yield from (replace(best, remat=remat) for remat in task.remats if None not in task.remats)
    if blocks is None or (best.remat is None and fits):
        return
    sizes = {axis.name: axis.size for axis in best.axes if axis.size > 1 and not axis.cuts_samples}
    for name in sizes:
        yield from (replace(best, saved={blocks: name}, remat=remat) for remat in (best.remat, None))
    for name, count in [("", 1), *sizes.items()]:
        below = replace(best, saved={blocks: (name, HOST) if name else HOST})
        if not fits:
            yield from (replace(below, remat=remat) for remat in task.remats)
        elif not _copies_too_much(whole, best, count):
            yield replace(below, remat=None)


def _copies_too_much(whole: WholePlans, best: Plan, num_pieces: int) -> bool:
    """Whether copying all that is saved without recomputation, once, takes longer than a step of the best plan."""
    without = whole.costs.get(replace(best, remat=None))
    if without is None:
        return False
    device = whole.task.machine.device
    return device.transfer_seconds(without.memory["saved"] // num_pieces, False) > whole.costs[best].seconds


def offloaded(whole: WholePlans) -> Iterator[Plan]:
    """The plans that come nearest to fitting, with the optimizer in host memory, and with parameters there too.

    Plans that save in host memory, unless that is fixed, are left out: they may need it no more.
    """
    plans = [plan for plan in whole.ranked() if whole.task.saved or not whole.costs[plan].memory.get("saved_below")]
    of_meshes = first_of_each(plans, lambda plan: str(plan.mesh))
    nearest = list(dict.fromkeys([*of_meshes[:NUM_OFFLOADED], *plans]))[:NUM_OFFLOADED]
    for plan in nearest:
        zero = replace(plan.zero or Zero(plan.axes[0].name, 3), offload=OPTIMIZER)
        all_stored = replace(zero, stage=3)
        for each in (zero, replace(zero, stage=2), all_stored, replace(all_stored, offload=PARAMETERS)):
            yield replace(plan, zero=each)


def in_rings(whole: WholePlans, pricer: Pricer) -> Iterator[Plan]:
    """The best plans that fit, with products in rings if these make one block clearly faster."""
    task = whole.task
    for plan in filter(whole.fits, () if task.is_for_memory else whole.ranked()[:NUM_RINGED]):
        block = replace(plan, remat=None, saved=None, pipeline=None, num_stages=1)
        for overlap in filter(None, (AUTO,) if task.overlaps is None else task.overlaps):
            prices = [pricer.of_few(replace(block, overlap=each), (task.machine,)) for each in (None, overlap)]
            plain, ringed = (each[0].seconds if each else inf for each in prices)
            if ringed < CLEARLY * plain:
                yield replace(plan, overlap=overlap)
