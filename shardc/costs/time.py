"""How long a step takes on a machine: every call and every collective of one rank on a timeline, before it runs.

A rank computes in the order of the program. A collective starts where it stands and goes on beside what is computed;
its first reader waits for it. Collectives over the same axes follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod

from torch import fx

from shardc.costs.count import ADAM_STATES, bytes_moved, flops_of_call, gradient_type, nbytes, of_parameters
from shardc.language.machine import Link, Machine
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_part
from shardc.language.sharding import dtype_name
from shardc.language.text import bytes_text
from shardc.ops.attention import is_attention
from shardc.program.collective import Collective
from shardc.program.communication import collective_at, is_collective
from shardc.program.lifetime import split
from shardc.program.node import is_getitem, is_view, operand
from shardc.program.program import Program, parameters_of
from shardc.program.provenance import Phase
from shardc.program.stages import SCHEDULED, Crossing, Part, Stage, Stages, has_stages
from shardc.program.text import range_name
from shardc.program.traffic import collectives_of
from shardc.schedules.costs import Costs, StageCost
from shardc.schedules.schedule import ActionPhase, Edge
from shardc.schedules.timeline import Task, Timeline, timeline

COMPUTING, OPTIMIZER, OVER = "computing", "optimizer step", "collectives over "  # lanes


@dataclass(frozen=True, slots=True)
class Slice:
    """A call or a collective on a lane: ``name`` is the node's, ``text`` says ``phase/module/name``.

    ``kind`` is a collective's. ``is_share``: the part of a collective's time in which its rank computes nothing.
    """

    name: str
    text: str
    phase: Phase
    kind: str = ""
    is_share: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def category(self) -> str:
        """In a trace: the kind of a collective, the phase of all else."""
        return self.kind or self.phase


def step_timeline(program: Program) -> Timeline:
    """One step of one rank, of a lowered program or a later one; its ``makespan`` is the predicted time in seconds.

    On the machine that it was compiled for. Adam's step is counted, where there are gradients. Of a pipeline it is that
    of all ranks: the schedule, between what each does once a step.
    """
    if has_stages(program):
        from shardc.costs.stage_record import StageRecord
        from shardc.costs.step import whole_step

        return whole_step(StageRecord(program))
    return timeline(tuple(_Lanes(program).tasks()), [COMPUTING])


def on_machine(program: Program, machine: Machine) -> Program:
    """The same program, its times estimated for another machine."""
    return replace(program, options=replace(program.options, machine=machine))


def collective_seconds(program: Program, found: Collective) -> float:
    """How long one collective takes, once."""
    return link_of(program, found).seconds(found.kind, found.wire_bytes, _num_ranks(program, found))


def call_seconds(program: Program, node: fx.Node) -> float:
    """How long one rank computes in a call; nothing where it only shows a value."""
    if is_getitem(node) or is_view(node):
        return 0.0
    types = [type_ for type_ in program.types(node) if type_ is not None]
    dtype = dtype_name(types[0].dtype) if types else "float32"
    flops = flops_of_call(program, node)
    return program.options.machine.device.seconds(flops, bytes_moved(program, node), dtype, is_attention(node.target))


def update_seconds(program: Program, names: Collection[str] | None = None) -> float:
    """Adam's step, of all parameters or of these: they and their states are read and written, gradients read."""
    made = of_parameters(program, "gradient")
    gradients = made if names is None else {name: node for name, node in made.items() if name in names}
    stored = parameters_of(program)
    held = sum(nbytes(program.local_type(stored[name])) for name in gradients)
    read = sum(nbytes(gradient_type(program, *each)) for each in gradients.items())
    return program.options.machine.device.update_seconds(2 * (1 + ADAM_STATES) * held + read)


def link_of(program: Program, found: Collective) -> Link:
    """What a collective goes over; a message between stages over the pipeline's axis."""
    pipeline, machine = program.options.pipeline, program.options.machine
    if found.kind in ("send", "recv") and pipeline is not None:
        return machine.of_axis(pipeline.axis)
    assert program.mesh is not None
    return machine.link(found.axes, program.mesh)


def _num_ranks(program: Program, found: Collective) -> int:
    assert program.mesh is not None
    if found.kind in ("send", "recv"):
        return 2
    return prod(parse_part(axis, program.mesh).size for axis in found.axes if axis != MICROBATCH)


@dataclass(slots=True)
class _Lanes:
    """The tasks of a program in its order. ``makers``: of each node met, the tasks that a reader of it waits for.

    ``last``: the latest task of the computing lane, before which none that follows in the program is issued.
    """

    program: Program
    makers: dict[fx.Node, tuple[Hashable, ...]] = field(default_factory=dict)
    last: tuple[Hashable, ...] = ()

    def tasks(self) -> Iterator[Task]:
        """Every call that takes time, each collective once, and the optimizer's step at the end."""
        parts = split(self.program)
        for node in (*parts.update, *parts.forward, *parts.backward):
            if is_collective(node):
                yield from self._collective(node)
            else:
                yield from self._call(node)
        if seconds := update_seconds(self.program):
            ends = tuple(dict.fromkeys(each for made in self.makers.values() for each in made))
            yield Task(Slice(OPTIMIZER, f"update/{OPTIMIZER}", "update"), (COMPUTING,), seconds, ends)

    def _call(self, node: fx.Node) -> Iterator[Task]:
        after, seconds = self._read(node), call_seconds(self.program, node)
        self.makers[node] = after
        if seconds:
            task = Task(self._slice(node), (COMPUTING,), seconds, after)
            self.makers[node] = self.last = (task.name,)
            yield task

    def _collective(self, node: fx.Node) -> Iterator[Task]:
        found = collective_at(self.program, node)
        seconds, link = collective_seconds(self.program, found), link_of(self.program, found)
        after = tuple(dict.fromkeys((*self._read(node), *self.last)))
        name = self._slice(node, found.kind)
        self.makers[node] = (name,)
        yield Task(name, (f"{OVER}{', '.join(found.axes)}",), seconds, after)
        if link.overlap < 1:
            share = Slice(name.name, f"{name.text} (its share)", name.phase, found.kind, is_share=True)
            self.last = (share,)
            yield Task(share, (COMPUTING,), seconds * (1 - link.overlap), after)

    def _read(self, node: fx.Node) -> tuple[Hashable, ...]:
        return tuple(dict.fromkeys(made for read in node.all_input_nodes for made in self.makers.get(read, ())))

    def _slice(self, node: fx.Node, kind: str = "") -> Slice:
        return Slice(node.name, range_name(self.program, node), self.program.source(node).phase, kind)


GAIN = 0.8  # what is sent must take less than this part of its time for a warning


def slow_link_note(program: Program) -> str:
    """What is sent over the axis that loses most, how long that takes, and how it would be otherwise; or nothing."""
    links = _links(program)
    if len(set(links.values())) < 2:
        return ""
    found = collectives_of(program)
    now = _seconds(program, found, links)
    ways = [dict(zip(links, each, strict=True)) for each in permutations(links.values())]
    best = min(ways, key=lambda way: sum(_seconds(program, found, way).values()))
    then = _seconds(program, found, best)
    total, other = sum(now.values()), sum(then.values())
    if other >= GAIN * total:
        return ""
    axis = max(links, key=lambda name: now[name] - then[name])
    return _text(program, found, axis, links, best, (total, other))


def _links(program: Program) -> dict[str, Link]:
    """Of each axis of several ranks its link; none where the machine names no axis."""
    machine, mesh, pipeline = program.options.machine, program.mesh, program.options.pipeline
    if mesh is None or not machine.links:
        return {}
    names = [name for name, size in mesh.sizes.items() if size > 1 and name != MICROBATCH]
    names += [pipeline.axis] if pipeline and pipeline.axis not in names and program.num_stages > 1 else []
    return {name: machine.of_axis(name) for name in names}


def _seconds(program: Program, found: Sequence[Collective], links: Mapping[str, Link]) -> dict[str, float]:
    """For each axis how long its collectives take in a step, if these are the links; those of several axes in parts."""
    there = on_machine(program, Machine(links, program.options.machine.device))
    seconds = dict.fromkeys(links, 0.0)
    for each in found:
        names = _axes(program, each)
        for name in names:
            seconds[name] += each.times * collective_seconds(there, each) / len(names)
    return seconds


def _axes(program: Program, found: Collective) -> list[str]:
    assert program.mesh is not None
    known = [axis for axis in found.axes if axis != MICROBATCH]
    return [axis if found.kind == "send" else parse_part(axis, program.mesh).name for axis in known]


def _text(
    program: Program,
    found: Sequence[Collective],
    axis: str,
    links: Mapping[str, Link],
    best: Mapping[str, Link],
    seconds: tuple[float, float],
) -> str:
    over = [each for each in found if axis in _axes(program, each)]
    count, sent = sum(each.times for each in over), sum(each.times * each.wire_bytes for each in over)
    others = ", ".join(f"{name} on {link.name}" for name, link in best.items() if link is not links[name])
    return (
        f"axis {axis} is on {links[axis].name}: {count} collectives a step send {bytes_text(sent)} over it\n"
        f"    all that is sent takes {1e3 * seconds[0]:.3g} ms a step, and {1e3 * seconds[1]:.3g} ms with {others}\n"
        f"    lay the mesh so: ranks that differ in {axis} alone are those joined by {best[axis].name}"
    )


PART_OF_PHASE: dict[ActionPhase, Part] = {"F": "forward", "B": "input_gradient"}
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
