"""What one microbatch costs in each stage of a pipeline, estimated from its program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from shardc.action import Edge, Phase
from shardc.announcement import collective_at, is_collective
from shardc.node import is_view, operand
from shardc.program import Program
from shardc.stage import SCHEDULED, Crossing, Part, Stage, Stages
from shardc.stage_cost import Costs, StageCost
from shardc.step_time import call_seconds, collective_seconds

PART_OF_PHASE: dict[Phase, Part] = {"F": "forward", "B": "input_gradient"}
PHASE_OF_PART = {part: phase for phase, part in PART_OF_PHASE.items()}
BACKWARD: tuple[Part, ...] = ("input_gradient", "weight_gradient")


def edges_of(stages: Stages) -> Mapping[Edge, tuple[fx.Node, ...]]:
    """The ways of messages once a microbatch, each with the values that go."""
    ways = ((way, nodes) for way, nodes in stages.crossings.items() if way.part in PHASE_OF_PART)
    return {Edge(way.source, way.target, PHASE_OF_PART[way.part]): nodes for way, nodes in ways}


def costs_of(stages: Stages) -> Costs:
    """Of a localized program: seconds of each part of each stage, what they save for each other, bytes of messages.

    On the machine that it was compiled for.
    """
    pipeline = stages.program.options.pipeline
    assert pipeline is not None
    link = stages.program.options.machine.of_axis(pipeline.axis)
    sent = {edge: _nbytes(stages.program, nodes) for edge, nodes in edges_of(stages).items()}
    costs = (_cost(stages, index) for index in range(len(stages.stages)))
    return Costs(tuple(costs), link.latency, link.bandwidth, sent)


def _cost(stages: Stages, index: int) -> StageCost:
    """``saved``: what backward reads of forward; ``held``: what weight gradients read of all before."""
    program, stage = stages.program, stages.stages[index]
    forward, *backward = ({*stage.parts[part], *_entering(stages.crossings, index, part)} for part in SCHEDULED)
    after_forward = {each for part in BACKWARD for each in _read(stage, part)}
    after_input = set(_read(stage, "weight_gradient"))
    times = [sum(seconds(program, node) for node in stage.parts[part]) for part in SCHEDULED]
    saved = _nbytes(program, forward & after_forward)
    held = _nbytes(program, (forward | backward[0]) & after_input)
    return StageCost(times[0], times[1], times[2], saved=saved, held=held)


def seconds(program: Program, node: fx.Node) -> float:
    """Estimated time of a call; of a collective, on the wire."""
    if is_collective(node):
        return collective_seconds(program, collective_at(program, node))
    return call_seconds(program, node)


def _entering(crossings: Mapping[Crossing, tuple[fx.Node, ...]], index: int, part: Part) -> Iterator[fx.Node]:
    return (node for way, nodes in crossings.items() if (way.target, way.part) == (index, part) for node in nodes)


def _read(stage: Stage, part: Part) -> Iterator[fx.Node]:
    """What a part reads, with what it shows the memory of."""
    for node in stage.parts[part]:
        for read in node.all_input_nodes:
            yield _owner(read)


def _owner(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = operand(node)
    return node


def _nbytes(program: Program, nodes: Iterable[fx.Node]) -> int:
    """Of values in memory of their own; of a call with several results none but those that are picked."""
    types = (program.local_type(node) for node in nodes if not program.has_many(node))
    return sum(type_.nbytes for type_ in types if type_ is not None)
