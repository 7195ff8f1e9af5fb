"""The schedule that a program's stages run by: named by the option ``pipeline``, with the messages that they need."""

from __future__ import annotations

from shardc.action import Edge, Phase, Schedule
from shardc.schedule_order import schedule
from shardc.stage import Part, Stages

PART_OF_PHASE: dict[Phase, Part] = {"F": "forward", "B": "input_gradient"}


def schedule_of(stages: Stages) -> Schedule:
    """The schedule of a program's stages, with its messages."""
    program = stages.program
    pipeline = program.options.pipeline
    assert pipeline is not None
    edges = [
        Edge(crossing.source, crossing.target, phase)
        for crossing in stages.crossings
        for phase, part in PART_OF_PHASE.items()
        if crossing.part == part
    ]
    ranks = program.num_stages // pipeline.chunks_a_rank
    found = schedule(pipeline.schedule, program.num_stages, pipeline.microbatches, num_ranks=ranks)
    trains = any(put.kind == "tangent" for put in program.inputs)
    return (found if trains else found.forward_only()).with_messages(edges)
