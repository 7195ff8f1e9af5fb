"""Seconds of a call, a collective and the optimizer's step on the machine that a program was compiled for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from torch import fx

from shardc.costs.flops import flops_of_call
from shardc.costs.parameter_bytes import ADAM_STATES, gradient_type, nbytes, results_by_parameter
from shardc.language.machine import Link, Machine
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_part
from shardc.language.sharding import dtype_name
from shardc.ops.attention import is_attention
from shardc.program.collective import Collective
from shardc.program.communication import collective_at, is_collective
from shardc.program.node import is_getitem, is_view
from shardc.program.program import Program, Value, parameters_of


def has_machine(program: Program) -> bool:
    """Whether a lowered program was compiled for a named machine, so that its times mean something."""
    return program.level in ("lowered", "localized") and program.options.machine != Machine()


def on_machine(program: Program, machine: Machine) -> Program:
    """The same program with times of another machine."""
    return replace(program, options=replace(program.options, machine=machine))


def seconds(program: Program, node: fx.Node) -> float:
    """The time of a call; of a collective, on the wire."""
    if is_collective(node):
        return collective_seconds(program, collective_at(program, node))
    return call_seconds(program, node)


def call_seconds(program: Program, node: fx.Node) -> float:
    """The time for which one rank computes in a call; 0 for a view."""
    if is_getitem(node) or is_view(node):
        return 0.0
    types = [type_ for type_ in program.types(node) if type_ is not None]
    dtype = dtype_name(types[0].dtype) if types else "float32"
    flops, moved = flops_of_call(program, node), bytes_moved(program, node)
    return program.options.machine.device.seconds(flops, moved, dtype, is_attention(node.target))


def bytes_moved(program: Program, node: fx.Node) -> int:
    """The bytes of a call's operands and results on one rank."""
    values: set[Value] = {program.value(operand) for operand in node.all_input_nodes}
    values |= {(node, i) for i, type_ in enumerate(program.types(node)) if type_ is not None}
    return sum(nbytes(program.local_type(*value)) for value in values)


def collective_seconds(program: Program, collective: Collective) -> float:
    """The time of one collective or one message between stages."""
    mesh, num_ranks = program.mesh, 2
    if collective.kind not in ("send", "recv"):
        assert mesh is not None
        num_ranks = prod(parse_part(axis, mesh).size for axis in collective.axes if axis != MICROBATCH)
    return link_of(program, collective).seconds(collective.kind, collective.wire_bytes, num_ranks)


def link_of(program: Program, collective: Collective) -> Link:
    """The link of a collective; of a message between stages, that of the pipeline's axis."""
    pipeline, machine = program.options.pipeline, program.options.machine
    if collective.kind in ("send", "recv") and pipeline is not None:
        return machine.of_axis(pipeline.axis)
    assert program.mesh is not None
    return machine.link(collective.axes, program.mesh)


def update_seconds(program: Program, names: Collection[str] | None = None) -> float:
    """The time of Adam's step, of all parameters or of the named ones.

    It reads and writes the parameters and their states, and reads the gradients.
    """
    gradients = results_by_parameter(program, "gradient")
    if names is not None:
        gradients = {name: node for name, node in gradients.items() if name in names}
    parameters = parameters_of(program)
    stored = sum(nbytes(program.local_type(parameters[name])) for name in gradients)
    read = sum(nbytes(gradient_type(program, *each)) for each in gradients.items())
    return program.options.machine.device.update_seconds(2 * (1 + ADAM_STATES) * stored + read)
