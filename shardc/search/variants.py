"""Variants of plans that were compiled whole: ways to fit in memory, rings, and what estimates leave undecided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations, product
from math import inf

from shardc.options import AUTO, Remat, Zero
from shardc.options.zero import HOST, OPTIMIZER, PARAMETERS
from shardc.search.found import EQUAL, Found, first_of_each, frontier, seconds_at
from shardc.search.pool import one_by_one
from shardc.search.pricing.price import Price, Pricer
from shardc.search.pricing.whole import WholePlans
from shardc.search.search import Search
from shardc.search.space.meshes import is_possible
from shardc.search.space.plan import Cuts, Plan
from shardc.search.task import Task

NUM_RECOMPUTED = 4  # best plans that recompute all blocks and are tried with less recomputation
NUM_BUDGETS = 4  # budgets of saved bytes to try until a plan fits
NUM_RINGED, CLEARLY = 3, 0.99  # best plans that are tried with rings, if these take less than this fraction of the time
LONG = 0.05  # part of a step in which a rank waits for copies, from which on ``offload`` is tried too
NUM_UNDECIDED = 6  # most single cuts, and most pairs of cuts, that are tried for an axis on the whole model
UNSURE, CLOSE = 1.0001, 1.001  # a change is tried if one of its estimates is below the first, both below the second
NUM_BASES, NUM_BASES_SLOWLY = 64, 16  # best cuts that are tried with parts in host memory; fewer where prices take long
NUM_OFFLOADED = 3  # meshes whose best estimates with parts in host memory are compiled whole
NUM_STAGED = 2  # pipelines that are tried with parts in host memory


def compile_variants(whole: WholePlans, search: Search) -> None:
    """Compile variants that may be better than the best: ways to fit, the least changes first; rings; other cuts."""
    blocks = search.pricer.blocks
    whole.compile(reordered(whole))
    _compute_or_save(whole, blocks)
    if whole.task.is_for_memory or _needs_host(whole):
        whole.compile(offloaded(whole, search))
        whole.compile(reordered(whole))
        _compute_or_save(whole, blocks)
    whole.compile(in_rings(whole, search.pricer))
    settle(whole, search)


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


def offloaded(whole: WholePlans, search: Search) -> Iterator[Plan]:
    """The best plans with the optimizer in host memory, and with parameters there too, by estimates.

    Pipelines have no estimates: those that come nearest to fitting are tried with their own ZeRO.
    """
    task = whole.task
    best_first = sorted(search.found.values(), key=lambda found: found.figure(task))
    bases = list(dict.fromkeys(replace(found.plan, zero=None, remat=None) for found in best_first))
    bases = bases[: NUM_BASES_SLOWLY if search.pricer.whole else NUM_BASES]
    below = list(chain.from_iterable(_with_stored_below(search, base) for base in bases))
    _ahead(search.pricer, task, below, of_few=True)
    on_one_block = frontier(_priced(below, search.pricer.of_few, task))
    ways = chain.from_iterable(_ways_to_offload(found.plan) for found in on_one_block)
    permitted = [plan for plan in dict.fromkeys(ways) if task.permits(plan)]
    _ahead(search.pricer, task, permitted)
    estimates = sorted(_priced(permitted, search.pricer.of_all, task), key=lambda found: found.rank(task))
    of_meshes = first_of_each((found.plan for found in estimates), lambda plan: str(plan.mesh))
    yield from of_meshes[:NUM_OFFLOADED]
    pipelines = [plan for plan in whole.ranked() if plan.pipeline is not None and plan.saved in (task.saved or (None,))]
    for plan in pipelines[:NUM_STAGED]:
        yield from _ways_to_offload(replace(plan, zero=plan.zero or Zero(plan.axes[0].name, 3)))


def _with_stored_below(search: Search, base: Plan) -> Iterator[Plan]:
    """A plan with all that it stores in host memory: each form of ZeRO 3, or of the highest stage that is allowed.

    Also over all axes in one step, since a rank then copies least. Both with recomputation and without.
    """
    names, stage = tuple(axis.name for axis in base.axes), max(search.task.stages)
    zeros = [*search.zeros(base, names, (stage,)), *([Zero(names, stage)] if stage and len(names) > 1 else [])]  # type: ignore[arg-type]
    for zero in zeros:
        stored = replace(zero, offload=PARAMETERS if stage == 3 else OPTIMIZER)
        yield from (replace(base, zero=stored, remat=remat) for remat in search.task.remats)


def _ways_to_offload(plan: Plan) -> Iterator[Plan]:
    """A plan with ZeRO that offloads the optimizer, at its own stage and at 2 and 3, or parameters too."""
    assert plan.zero is not None
    zero = replace(plan.zero, offload=OPTIMIZER)
    all_stored = replace(zero, stage=3)
    for each in (zero, replace(zero, stage=2), all_stored, replace(all_stored, offload=PARAMETERS)):
        yield replace(plan, zero=each)


def _priced(plans: Iterable[Plan], price: Callable[..., Sequence[Price] | None], task: Task) -> list[Found]:
    """The plans that can be compiled, with their prices on the machine of the task."""
    return [Found(plan, prices[0]) for plan in plans if (prices := price(plan, (task.machine,)))]


def in_rings(whole: WholePlans, pricer: Pricer) -> Iterator[Plan]:
    """The best plans that fit, with products in rings if these make one block clearly faster."""
    task = whole.task
    for plan in filter(whole.fits, () if task.is_for_memory else whole.ranked()[:NUM_RINGED]):
        block = replace(plan, remat=None, saved=None, pipeline=None, num_stages=1)
        for overlap in filter(None, (AUTO,) if task.overlaps is None else task.overlaps):
            plain, ringed = (replace(block, overlap=each) for each in (None, overlap))
            if _ratio(pricer.of_few, task, ringed, plain) < CLEARLY:
                yield replace(plan, overlap=overlap)


def settle(whole: WholePlans, search: Search) -> None:
    """Change the cuts of the best plan where the whole model gets faster by it, since estimates are not exact.

    For each axis: first add single cuts that make the plan faster. Then try pairs of cuts, both to be added or one to
    replace the other, and take the best pair. Last, drop each cut without which the plan is no slower.
    """
    best = whole.ranked()[0]
    if best.pipeline is not None or best.written is not None:
        return
    for i in range(len(best.axes)):
        best = _tried(whole, best, i, _undecided(search, best, i))
        single, pairs = best, _undecided_pairs(search, best, i)
        _compile_ahead(whole, single, i, pairs)
        for pair in pairs:
            best = _better(whole, best, _changed(single, i, pair), i)
        own = _cuts_of_model(best, i)
        best = _tried(whole, best, i, own if whole.task.is_for_memory else _likely(search, best, i, own, CLOSE))


def _tried(whole: WholePlans, best: Plan, i: int, changes: Sequence[Cuts]) -> Plan:
    """The best plan after the changes of its ``i``-th axis are tried one by one, each on the best so far."""
    for k, change in enumerate(changes):
        _compile_ahead(whole, best, i, changes[k : k + whole.workers.count])
        best = _better(whole, best, _changed(best, i, change), i)
    return best


def _compile_ahead(whole: WholePlans, plan: Plan, i: int, changes: Iterable[Cuts]) -> None:
    changed = (_changed(plan, i, change) for change in changes)
    whole.ahead(each for each in changed if each.axes[i].cuts)


def _better(whole: WholePlans, best: Plan, changed: Plan, i: int) -> Plan:
    """The best plan, or the one with a changed ``i``-th axis if that is faster, or shorter and no slower."""
    whole.compile([changed] if changed.axes[i].cuts else [])
    if changed not in whole.costs:
        return best
    old, new, task = whole.found(best), whole.found(changed), whole.task
    is_shorter = len(changed.axes[i].cuts) < len(best.axes[i].cuts)
    is_better = not old.is_better(new, task, EQUAL) if is_shorter else new.is_better(old, task, EQUAL)
    return changed if is_better else best


def _undecided(search: Search, plan: Plan, i: int) -> list[Cuts]:
    """Single cuts that may make the plan faster when they are added to its ``i``-th axis.

    There are none if plans are always priced on the whole model, or if memory is the objective.
    """
    if search.pricer.whole is not None or search.task.is_for_memory:
        return []
    of_model = (decision for decision in search.decisions if decision.kind != "samples")
    seeds = chain.from_iterable(decision.by_seed() for decision in of_model)
    further = (frozenset({each}) for each in seeds if each not in plan.axes[i].cuts)
    return _likely(search, plan, i, further)[:NUM_UNDECIDED]


def _undecided_pairs(search: Search, plan: Plan, i: int) -> list[Cuts]:
    """Pairs of cuts that may make the plan faster: on its ``i``-th axis, both are added, or one replaces the other."""
    further = _undecided(search, plan, i)
    pairs = chain(combinations(further, 2), product(_cuts_of_model(plan, i), further))
    return _likely(search, plan, i, (one | other for one, other in pairs))[:NUM_UNDECIDED]


def _likely(search: Search, plan: Plan, i: int, changes: Iterable[Cuts], least: float = UNSURE) -> list[Cuts]:
    """The changes of the ``i``-th axis that may make the plan faster, the best first.

    Each change has two estimates, from one block and from all blocks: the time with it divided by the time without it.
    The smaller one must be below ``least``, and both below ``CLOSE``. Changes with equal estimates make the same
    program, so only the first of them is returned.
    """
    pricer, task, base = search.pricer, search.task, replace(plan, remat=None, saved=None)
    changed = {change: _changed(base, i, change) for change in changes}
    _ahead(pricer, task, [base, *changed.values()], of_few=True)
    of_few = {change: _ratio(pricer.of_few, task, each, base) for change, each in changed.items()}
    may_be = [change for change in changed if of_few[change] < CLOSE]  # others need no longer compilation
    _ahead(pricer, task, [base, *map(changed.__getitem__, may_be)])
    estimates = {each: (of_few[each], _ratio(pricer.of_all, task, changed[each], base)) for each in may_be}
    close = [each for each in estimates if min(estimates[each]) < least and max(estimates[each]) < CLOSE]
    distinct = first_of_each(close, estimates.__getitem__)
    return sorted(distinct, key=lambda each: min(estimates[each]))


def _ahead(pricer: Pricer, task: Task, plans: Iterable[Plan], of_few: bool = False) -> None:
    """Compile plans whose estimates are asked for next."""
    pricer.ahead([each for each in plans if is_possible(each.axes)], (task.machine,), of_few)


def _ratio(price: Callable[..., Sequence[Price] | None], task: Task, plan: Plan, base: Plan) -> float:
    """The estimated time of a plan divided by that of another; infinite if one of them cannot be compiled."""
    new, old = (price(each, (task.machine,)) if is_possible(each.axes) else None for each in (plan, base))
    return new[0].seconds / old[0].seconds if new and old else inf


def _cuts_of_model(plan: Plan, i: int) -> list[Cuts]:
    """The cuts of the ``i``-th axis other than that of samples, one by one."""
    return one_by_one(frozenset(cut for cut in plan.axes[i].cuts if cut.kind != "samples"))


def _changed(plan: Plan, i: int, change: Cuts) -> Plan:
    """The plan with a change of its ``i``-th axis: cuts are added, or dropped if the axis has them."""
    axis = plan.axes[i]
    return replace(plan, axes=(*plan.axes[:i], replace(axis, cuts=axis.cuts ^ change), *plan.axes[i + 1 :]))
