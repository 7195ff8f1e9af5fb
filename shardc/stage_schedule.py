"""The schedule that a program's stages run by: named by the option ``pipeline``, with the messages that they need."""

from __future__ import annotations

from dataclasses import replace

from shardc.action import Schedule
from shardc.knowledge import kept
from shardc.pipeline_cost import costs_of, edges_of
from shardc.program import Program
from shardc.schedule_order import schedule
from shardc.stage_cut import stages_of
from shardc.stage_state import resident_bytes


@kept
def schedule_of(program: Program) -> Schedule:
    """The schedule of a localized program's stages, proven, with its messages in the order of what stages cost.

    Which rank holds which stage depends on the option alone, and is the same for all programs of a model.
    """
    stages, pipeline = stages_of(program), program.options.pipeline
    assert pipeline is not None
    costs, edges, place = costs_of(stages), edges_of(stages), pipeline.place(program.num_stages)
    stored = resident_bytes(program, stages.stages, place)
    full = tuple(replace(cost, resident=nbytes) for cost, nbytes in zip(costs.stages, stored, strict=True))
    found = schedule(
        pipeline.schedule, program.num_stages, pipeline.microbatches, num_ranks=max(place) + 1, edges=edges,
        costs=replace(costs, stages=full), memory=pipeline.max_memory, place=place,
    )  # fmt: skip
    assert found.place == place, (found.place, place)
    trains = any(put.kind == "tangent" for put in program.inputs)
    return (found if trains else found.forward_only()).with_messages(edges, costs).check()
