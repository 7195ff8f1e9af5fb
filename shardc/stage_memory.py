"""Bytes on one rank of a pipeline by class: of its stages' parameters, and of the microbatches that are under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardc.cost import is_gathered
from shardc.ends import parameters_of
from shardc.lifetime import Storage, storages
from shardc.program import Program
from shardc.stage import Stage
from shardc.stage_cut import stages_of
from shardc.stage_ledger import rank_bytes
from shardc.stage_schedule import schedule_of
from shardc.stage_state import stored_bytes


def stage_memory(program: Program) -> dict[str, int]:
    """Of a lowered or localized program, on the rank with the highest peak; see ``memory_by_rank``."""
    return max(memory_by_rank(program), key=lambda memory: memory["peak"])


def memory_by_rank(program: Program) -> list[dict[str, int]]:
    """Of a lowered or localized program, for each rank of its pipeline.

    As ``memory_of``, of the stages that the rank holds. ``saved``: the most that is kept between two of the schedule's
    actions of all microbatches under way; ``gathered`` lives for the whole step; ``peak`` is that of a whole step, with
    the inputs of all microbatches, both the sums of gradients and what is being added to them, and messages.
    """
    stages = stages_of(program)
    schedule, live = schedule_of(program), list(storages(program))
    found = []
    for rank, (saved, peak) in enumerate(rank_bytes(stages, schedule)):
        here = [stages.stages[stage] for stage in schedule.stages_on(rank)]
        of_rank = dict(_of_rank(program, here, live)) | {"saved": saved, "peak": peak}
        found.append({name: of_rank[name] for name in ORDER})
    return found


ORDER = ("parameters", "gradients", "optimizer", "saved", "gathered", "peak")


def _of_rank(program: Program, stages: Iterable[Stage], live: Iterable[Storage]) -> Iterator[tuple[str, int]]:
    """What does not depend on the schedule, of the stages of one rank."""
    stages = list(stages)
    nodes = parameters_of(program)
    yield from stored_bytes(program, {name for stage in stages for name in stage.parameters}).items()
    gathered = [each for each in live if is_gathered(program, each.value[0], nodes)]
    once = [set(stage.parts["once"]) for stage in stages]  # of what two of them read each has a copy
    yield "gathered", sum(each.nbytes for calls in once for each in gathered if each.value[0] in calls)
