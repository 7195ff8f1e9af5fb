"""Bytes on one rank of a pipeline by class: of its stages' parameters, and of the microbatches that are under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from shardc.cost import ADAM_STATES, gradient_type, is_gathered, nbytes, of_parameters
from shardc.lifetime import storages
from shardc.pipeline_cost import costs_of
from shardc.program import Program
from shardc.schedule_time import peak_bytes
from shardc.stage import Stage
from shardc.stage_cut import stages_of
from shardc.stage_schedule import schedule_of


def stage_memory(program: Program) -> dict[str, int]:
    """Of a lowered or localized program, each class on the rank that has most of it.

    As ``memory_of``, but ``saved`` is what lives for the schedule at its peak, of all microbatches, messages included;
    ``gathered`` lives for the whole step; and ``peak`` is the most of parameters, gradients, gathered and saved.
    """
    stages = stages_of(program)
    schedule = schedule_of(stages)
    saved = peak_bytes(schedule, costs_of(stages))
    ranks = [
        dict(_of_rank(program, [stages.stages[stage] for stage, at in enumerate(schedule.place) if at == rank]))
        | {"saved": saved[rank]}
        for rank in range(schedule.num_ranks)
    ]
    peak = max(sum(count for name, count in rank.items() if name != "optimizer") for rank in ranks)
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {**{name: most[name] for name in ORDER}, "peak": peak}


ORDER = ("parameters", "gradients", "optimizer", "saved", "gathered")


def _of_rank(program: Program, stages: Iterable[Stage]) -> Iterator[tuple[str, int]]:
    """What does not depend on the schedule, of the stages of one rank."""
    stages = list(stages)
    nodes: Mapping[str, fx.Node] = {
        name: node for (kind, name), node in program.named_inputs.items() if kind == "parameter"
    }
    held = dict.fromkeys(name for stage in stages for name in stage.parameters)
    gradients = {name: node for name, node in of_parameters(program, "gradient").items() if name in held}
    yield "parameters", sum(nbytes(program.local_type(nodes[name])) for name in held)
    yield "gradients", sum(nbytes(gradient_type(program, *each)) for each in gradients.items())
    yield "optimizer", ADAM_STATES * sum(nbytes(program.local_type(nodes[name])) for name in gradients)
    once = {node for stage in stages for node in stage.parts["once"]}
    gathered = (each for each in storages(program) if each.value[0] in once)
    yield "gathered", sum(each.nbytes for each in gathered if is_gathered(program, each.value[0], nodes))
