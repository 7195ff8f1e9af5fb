"""The schedule of a pipeline program's stages, from their costs and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from shardc.costs.count import resident_bytes, seconds, stage_link
from shardc.language.words import Part
from shardc.program.node import is_view, operand
from shardc.program.program import Program
from shardc.program.stages import SCHEDULED, Stages, cached_on_program, stages_of
from shardc.schedules.check import check
from shardc.schedules.named import schedule
from shardc.schedules.schedule import ActionPhase, Edge, Schedule
from shardc.schedules.simulate import Costs, StageCost, with_messages

PART_OF_PHASE: dict[ActionPhase, Part] = {"F": "forward", "B": "input_gradient"}
PHASE_OF_PART = {part: phase for phase, part in PART_OF_PHASE.items()}


@cached_on_program
def schedule_of(program: Program) -> Schedule:
    """The schedule of a lowered or localized program, proven, with its messages; ``auto`` is chosen by estimated costs.

    The rank of each stage depends on ``Pipeline`` alone, and is the same for all programs of a model. Raises a
    ShardingError for a schedule that cannot run.
    """
    stages, pipeline = stages_of(program), program.options.pipeline
    assert pipeline is not None
    costs, place = stage_costs(stages), pipeline.place(program.num_stages)
    stored = resident_bytes(program, stages.stages, place)
    full = tuple(replace(cost, resident=nbytes) for cost, nbytes in zip(costs.stages, stored, strict=True))
    order: Schedule = schedule(
        pipeline.schedule, program.num_stages, pipeline.microbatches, num_ranks=max(place) + 1,
        edges=stage_edges(stages), costs=replace(costs, stages=full), memory=pipeline.max_memory, place=place,
    )  # fmt: skip
    assert order.place == place, (order.place, place)
    if not any(put.kind == "tangent" for put in program.inputs):
        order = order.forward_only()
    order = with_messages(order, costs)
    check(order)
    return order


def stage_edges(stages: Stages) -> Mapping[Edge, tuple[fx.Node, ...]]:
    """The edges over which every microbatch sends a message, with its values."""
    ways = ((way, nodes) for way, nodes in stages.crossings.items() if way.part in PHASE_OF_PART)
    return {Edge(way.source, way.target, PHASE_OF_PART[way.part]): nodes for way, nodes in ways}


def stage_costs(stages: Stages) -> Costs:
    """The estimated costs of stages and messages on the machine that the program was compiled for.

    Seconds of each scheduled part of each stage, bytes that parts save for each other, bytes of messages.
    """
    link = stage_link(stages.program)
    sent = {edge: _nbytes(stages.program, nodes) for edge, nodes in stage_edges(stages).items()}
    costs = (_stage_cost(stages, index) for index in range(len(stages.stages)))
    return Costs(tuple(costs), *link.of_kind("send"), sent)


def _stage_cost(stages: Stages, index: int) -> StageCost:
    """``saved``: bytes of forward that backward reads; ``held``: bytes of earlier parts that weight gradients read."""
    program, parts = stages.program, stages.stages[index].parts
    values: dict[Part, set[fx.Node]] = {part: set(parts[part]) for part in SCHEDULED}
    for way, nodes in stages.crossings.items():
        if way.target == index and way.part in values:
            values[way.part] |= set(nodes)

    def owner(node: fx.Node) -> fx.Node:
        return owner(operand(node)) if is_view(node) else node

    reads = {part: {owner(read) for node in parts[part] for read in node.all_input_nodes} for part in SCHEDULED}
    saved = _nbytes(program, values["forward"] & (reads["input_gradient"] | reads["weight_gradient"]))
    held = _nbytes(program, (values["forward"] | values["input_gradient"]) & reads["weight_gradient"])
    forward, input_, weight = (sum(seconds(program, node) for node in parts[part]) for part in SCHEDULED)
    return StageCost(forward, input_, weight, saved=saved, held=held)


def _nbytes(program: Program, nodes: Iterable[fx.Node]) -> int:
    """The bytes of values. Of a call with several results, each result that is picked counts by itself."""
    types = (program.local_type(node) for node in nodes if not program.has_many(node))
    return sum(type_.nbytes for type_ in types if type_ is not None)
