"""How long a step takes on a machine: every call and every collective of one rank on a timeline, before it runs.

A rank computes in the order of the program. A collective starts where it stands and goes on beside what is computed;
its first reader waits for it. Collectives over the same axes follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from shardc.announcement import collective_at, is_collective
from shardc.collective import Collective
from shardc.cost import ADAM_STATES, bytes_moved, flops_of_call, gradient_type, nbytes, of_parameters
from shardc.ends import parameters_of
from shardc.fact import Phase
from shardc.lifetime import split
from shardc.link import Link
from shardc.machine import Machine
from shardc.mesh import MICROBATCH
from shardc.node import is_getitem, is_view
from shardc.ops.attention import is_attention
from shardc.partition import parse_part
from shardc.program import Program
from shardc.range_name import range_name
from shardc.sharding import dtype_name
from shardc.stage import has_stages
from shardc.timeline import Task, Timeline, timeline

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
        from shardc.stage_record import StageRecord
        from shardc.stage_step import whole_step

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
