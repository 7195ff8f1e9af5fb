"""What each rank of a pipeline makes again so that it saves at most so many bytes of all its microbatches under way.

Each rank's stages are a cut of their own (choose_saved.py), in which a value counts as often as microbatches of it live
at a time; what crosses between stages is not made again. That bound is high where a rank's stages are not full at once,
and low by what a backward in two leaves for the gradients of weights. So the ledger measures the program that is made,
and ranks that save too much get less, until all of them save what they may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from torch import fx

from shardc.action import Schedule
from shardc.lifetime import Parts, owners_of
from shardc.options import Remat
from shardc.program import Program, Value
from shardc.stage_cut import Kinds, Places, stages_of
from shardc.stage_ledger import rank_bytes
from shardc.stage_schedule import schedule_of

from .choose_saved import Chooser, Share, too_little

TRIES = 4
CHANGE = {"F": 1, "B": -1, "W": -1}  # of how many microbatches a stage has begun and not ended
Choose = Callable[[Program, Parts, Collection[fx.Node]], set[Value]]  # of a program, what backward makes again


def within_budget_a_rank(program: Program, remat: Remat, remade: Callable[[Program, Choose], Program]) -> Program:
    """The program whose ranks save no more than the budget. ShardingError where one must save more.

    ``remade``: a copy of a program, in which backward makes again what is chosen.
    """
    assert remat.budget is not None
    most, whole = remat.budget, saved_bytes(_in_any_memory(program))
    if max(whole) <= most:
        return program
    budgets = [most] * len(whole)
    for left in reversed(range(TRIES)):
        found = remade(program, partial(_in_ranks, remat=remat, budgets=budgets))
        saved = saved_bytes(found)
        if max(saved) <= most:
            return found
        less = [max(0, budget - (each - most) if left > 1 else 0) for budget, each in zip(budgets, saved, strict=True)]
        budgets = [old if each <= most else new for old, new, each in zip(budgets, less, saved, strict=True)]
    raise too_little(remat, max(whole), max(saved))


def saved_bytes(program: Program) -> list[int]:
    """What each rank saves, as ``memory`` says it."""
    return [saved for saved, _ in rank_bytes(stages_of(program), schedule_of(program))]


def _in_any_memory(program: Program) -> Program:
    """The same graph, of which it is found out anew what schedule it has, were there memory enough."""
    options = program.options
    assert options.pipeline is not None
    return replace(program, options=replace(options, pipeline=replace(options.pipeline, max_memory=None)))


def _in_ranks(
    program: Program, parts: Parts, twins: Collection[fx.Node], remat: Remat, budgets: Sequence[int]
) -> set[Value]:
    program = _in_any_memory(program)  # what is found out here holds until the graph is changed
    owners, found = owners_of(program, (*parts.update, *parts.forward)), set[Value]()
    for share, budget in zip(_shares(program, parts, owners), budgets, strict=True):
        chooser = Chooser(program, share, remat, twins, owners)
        found |= chooser.forgotten(chooser.within(budget))
    return found


def _shares(program: Program, parts: Parts, owners: Mapping[Value, Value]) -> Iterator[Share]:
    """For each rank the calls of its stages, those that every stage makes for itself, and what its stages are sent.

    What is made once a step is there anyway.
    """
    kinds, schedule = Kinds(program), schedule_of(program)
    stage, flying = Places(kinds).stage, in_flight(schedule)
    ways = ((way.target, nodes) for way, nodes in stages_of(program).crossings.items() if way.part == "forward")
    sent = {(target, owners[program.value(node)][0]) for target, nodes in ways for node in nodes}
    fixed = {node for _, node in sent}
    for rank in range(schedule.num_ranks):
        here = {index for index, home in enumerate(schedule.place) if home == rank}
        taken, most = {node for target, node in sent if target in here}, max(flying[index] for index in here)

        def is_here(node: fx.Node, here: set[int] = here) -> bool:
            return node in kinds.timed and stage.get(node, min(here)) in here

        forward = [node for node in parts.forward if is_here(node) or node in taken]
        times = {node: flying[stage[node]] if stage.get(node) in here else most for node in forward}
        yield Share(forward, [node for node in parts.backward if is_here(node)], fixed, times)


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most microbatches that it has begun and not ended."""
    return [
        max(accumulate((CHANGE.get(each.kind, 0) for each in schedule.actions[rank] if each.stage == stage), initial=0))
        for stage, rank in enumerate(schedule.place)
    ]
