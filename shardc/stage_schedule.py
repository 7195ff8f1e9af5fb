"""The schedule that a program's stages run by: named by the option ``pipeline``, with the messages that they need."""

from __future__ import annotations

from shardc.action import Schedule
from shardc.options import Pipeline
from shardc.pipeline_cost import costs_of, edges_of
from shardc.schedule_order import schedule
from shardc.stage import Stages


def schedule_of(stages: Stages) -> Schedule:
    """The schedule of a localized program's stages, proven, with its messages in the order of what stages cost."""
    program = stages.program
    pipeline = program.options.pipeline
    assert pipeline is not None
    ranks = program.num_stages // pipeline.chunks_a_rank
    costs, edges = costs_of(stages), edges_of(stages)
    found = schedule(
        pipeline.schedule, program.num_stages, pipeline.microbatches, num_ranks=ranks, edges=edges, costs=costs
    )
    trains = any(put.kind == "tangent" for put in program.inputs)
    return (found if trains else found.forward_only()).with_messages(edges, costs).check()


def place_of(pipeline: Pipeline, num_stages: int) -> tuple[int, ...]:
    """The rank of each stage; that of the stages in order where ``auto`` is yet to choose."""
    ranks = num_stages // pipeline.chunks_a_rank
    if pipeline.schedule == "auto":
        return tuple(stage % ranks for stage in range(num_stages))
    return schedule(pipeline.schedule, num_stages, pipeline.microbatches, num_ranks=ranks).place
