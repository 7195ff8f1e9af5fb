"""Counts of a program and of its calls: floating-point operations, bytes of parameters, bytes moved and seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import conv_flop_count, flop_registry

from shardc.costs.copies import copy_seconds
from shardc.language.machine import HierarchicalLink, Link, Machine
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_part
from shardc.language.sharding import TensorType, dtype_name
from shardc.ops.attention.rules import RINGS, is_attention, ring_flops
from shardc.ops.attention.tiled import TILED, TILED_BACKWARD, TILED_MASK_BACKWARD
from shardc.ops.contraction import DOT_RINGS, chunk_calls, dot, dots_flops
from shardc.ops.tier import TRANSFERS
from shardc.options.options import OPTIMIZERS
from shardc.options.zero import HOST
from shardc.program.collective import GO_ROUND, Collective
from shardc.program.communication import collective_at, is_collective, local_types, num_chunks, ring_of
from shardc.program.lifetime import is_row_of_kept, stored_below
from shardc.program.node import is_free, operand
from shardc.program.program import Program, Value, ends_of, parameters_of
from shardc.program.stages import Stage, cached_on_program, has_stages
from shardc.program.text import rank_axes

aten = torch.ops.aten

COUNTED_AS = {  # op without a formula in torch: the op with the same operands whose formula is used
    TILED.overloadpacket: aten._scaled_dot_product_flash_attention,
    TILED_BACKWARD.overloadpacket: aten._scaled_dot_product_flash_attention_backward,
    TILED_MASK_BACKWARD.overloadpacket: aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
Shape = tuple[int, ...]
TypeOf = Callable[[fx.Node, int], TensorType | None]


def flops_of(program: Program, of_rank: bool = False) -> int:
    """Operations of contractions, convolutions and attentions; a multiply and an add are two.

    ``of_rank``: on one rank's shards; otherwise on the types of the program, which are global before localize.
    """
    if of_rank:
        return sum(flops for flops, _ in work_of(program).values())
    return sum(_flops(program, node, lambda node, index: program.types(node)[index]) for node in program.calls)


def flops_of_call(program: Program, node: fx.Node) -> int:
    """Operations of one call on one rank's shards."""
    return _flops(program, node, program.local_type)


def _flops(program: Program, node: fx.Node, type_of: TypeOf) -> int:
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = OWN_FORMULAS.get(packet) or flop_registry.get(COUNTED_AS.get(packet, packet))
    if formula is None and node.target is not dot and node.target not in GO_ROUND:
        return 0
    operands: Any = fx.map_arg((node.args, node.kwargs), lambda node: _shape(type_of(*program.value(node))))
    args, kwargs = operands
    if node.target in RINGS:
        return ring_flops(node.target, args)
    results = tuple(_shape(type_of(node, index)) for index in range(len(program.types(node))))
    if node.target in DOT_RINGS:
        return dots_flops(node.target, args, results)
    if formula is None:  # a multiply and an add for every combination of the factors
        a, b, spec = args
        names = spec.partition("->")[0].replace(",", " ").split()
        return 2 * math.prod(dict(zip(names, a + b, strict=True)).values())
    flops: int = formula(*args, **kwargs, out_val=results if program.has_many(node) else results[0])
    return flops


def _shape(type_: TensorType | None) -> Shape | None:
    return None if type_ is None else type_.shape


def _convolution_backward_flops(grad: Shape, x: Shape, weight: Shape, *further: Any, out_val: Any) -> int:
    """Each of the two gradients costs as much as the forward. torch's formula ignores groups."""
    is_transposed, mask = further[4], further[7]
    each: int = conv_flop_count(list(x), list(weight), list(grad), transposed=is_transposed)
    return (mask[0] + mask[1]) * each


OWN_FORMULAS: dict[Any, Callable[..., int]] = {aten.convolution_backward: _convolution_backward_flops}


def nbytes(type_: TensorType | None) -> int:
    """The bytes of a value on one rank; 0 for a value that is no tensor."""
    return 0 if type_ is None else type_.nbytes


def stored_bytes(program: Program, names: Collection[str]) -> dict[str, int]:
    """Bytes by class of these parameters as they are stored, their gradients and the optimizer's states.

    Parameters include the copies that are kept to compute on; a pipeline keeps none between steps. ``offloaded``: the
    bytes, of all classes, that are not on the device.
    """
    nodes = parameters_of(program)
    results = {} if has_stages(program) else results_by_parameter(program, "computed")
    kept = {name: node for name, node in results.items() if name in names}
    rows = {name for name, node in kept.items() if is_row_of_kept(program, name, nodes[name], node)}
    stored = (*(nodes[name] for name in names if name not in rows), *kept.values())
    gradients = {name: node for name, node in results_by_parameter(program, "gradient").items() if name in names}
    bytes_ = {
        "parameters": sum(nbytes(program.local_type(node)) for node in stored),
        "gradients": sum(nbytes(gradient_type(program, *each)) for each in gradients.items()),
        "optimizer": program.options.optimizer_states
        * sum(nbytes(program.local_type(nodes[name])) for name in gradients),
    }
    offloaded = sum(bytes_.values()) if program.options.offloads else 0  # a pipeline offloads all of it
    if program.options.offloaded is not None:
        below = stored_below(program).intersection((*stored, *gradients.values()))
        offloaded = sum(nbytes(program.local_type(node)) for node in below) + bytes_["optimizer"]
    return {**bytes_, "offloaded": offloaded}


def resident_bytes(program: Program, stages: Sequence[Stage], place: Sequence[int]) -> Iterator[int]:
    """The bytes of all classes that each stage stores on the device; what stages of one rank share counts once."""
    counted: dict[int, set[str]] = {rank: set() for rank in place}
    for stage, rank in zip(stages, place, strict=True):
        stored = stored_bytes(program, set(stage.parameters) - counted[rank])
        offloaded = stored.pop("offloaded")
        yield sum(stored.values()) - offloaded
        counted[rank] |= set(stage.parameters)


def results_by_parameter(program: Program, kind: str) -> dict[str, fx.Node]:
    """The results of a kind, ``gradient`` or ``computed``, by the names of their parameters."""
    names = {node: name for name, node in parameters_of(program).items()}
    ends = ((owner, node) for output, owner, node in ends_of(program) if output.kind == kind and owner in names)
    return {names[owner]: node for owner, node in ends if node is not None}


def gradient_type(program: Program, name: str, node: fx.Node) -> TensorType | None:
    """The type of a parameter's gradient on one rank, between backward and the optimizer's step."""
    zero = program.options.zero
    if zero is None or zero.stage != 1 or name not in program.computed:
        return program.local_type(node)
    shape = program.computed[name].local_shape(program.global_type(node).shape)
    return TensorType(shape, program.type(node).dtype)


def has_machine(program: Program) -> bool:
    """Whether a lowered program was compiled for a named machine, so that its times mean something."""
    return program.level in ("lowered", "localized") and program.options.machine != Machine()


def on_machine(program: Program, machine: Machine) -> Program:
    """The same program with times of another machine."""
    elsewhere = replace(program, options=replace(program.options, machine=machine))
    elsewhere.cache[work_of] = work_of(program)
    return elsewhere


def seconds(program: Program, node: fx.Node) -> float:
    """The time of a call; of a collective, on the wire and for the copies around it.

    In a ring it is the longer of sending and computing, plus the chunk that is computed while nothing is sent.
    """
    if not is_collective(node):
        return call_seconds(program, node)
    sending = collective_seconds(program, collective_at(program, node))
    if node.target not in GO_ROUND:
        return sending + sum(copy_seconds(program, node))
    computing, alone = call_seconds(program, node), chunk_seconds(program, node)
    return max(sending, computing - alone) + alone


Work = tuple[int, int]  # the operations of a call on one rank's shards, and the bytes that it moves


@cached_on_program
def work_of(program: Program) -> Mapping[fx.Node, Work]:
    """The work of each call of a program that no pass changes any more. It is the same on every machine."""
    return {node: (flops_of_call(program, node), bytes_moved(program, node)) for node in program.calls}


def call_seconds(program: Program, node: fx.Node, work: Work | None = None) -> float:
    """The time that one rank computes in a call; 0 for a view. ``work``: the call's work, if it is known."""
    if is_free(node):
        return 0.0
    if node.target in DOT_RINGS:
        return num_chunks(program, node) * chunk_seconds(program, node)
    if node.target in TRANSFERS:
        device, size = program.options.machine.device, nbytes(program.local_type(node))
        in_files = node.args[1] != HOST if len(node.args) > 1 else program.options.in_files
        return device.transfer_seconds(size, in_files)
    types = [type_ for type_ in program.types(node) if type_ is not None]
    dtype = dtype_name(types[0].dtype) if types else "float32"
    flops, moved = work or (flops_of_call(program, node), bytes_moved(program, node))
    ring = ring_of(node)
    if ring is not None:
        flops = round(ring.imbalance * flops)  # all ranks wait for the busiest
    return program.options.machine.device.seconds(flops, moved, dtype, is_attention(node.target) or ring is not None)


def chunk_seconds(program: Program, node: fx.Node) -> float:
    """The time of the chunk of a ring that is computed while nothing is sent; 0 for other calls.

    It is the last chunk to arrive, or the first chunk of a sum.
    """
    ring = ring_of(node)
    if ring is not None and ring.steps:
        return call_seconds(program, node) / (ring.steps + 1)
    if node.target not in DOT_RINGS:
        return 0.0
    device, dtype = program.options.machine.device, dtype_name(program.value_type(program.value(operand(node))).dtype)
    calls = chunk_calls(node.target, node.args, num_chunks(program, node), *local_types(program, node))
    return sum(device.seconds(flops, moved, dtype) for flops, moved in calls)


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
    link, steps = link_of(program, collective), collective.steps
    return steps * link.seconds(collective.kind, collective.wire_bytes // steps, num_ranks)


def stage_link(program: Program) -> Link:
    """The link of messages between the stages of a pipeline."""
    pipeline = program.options.pipeline
    assert pipeline is not None
    return program.options.machine.of_stages(pipeline.axis, prod(rank_axes(program).values()))


def link_of(program: Program, collective: Collective) -> Link | HierarchicalLink:
    """The link of a collective; of a message between stages, that of the pipeline's axis."""
    pipeline, machine = program.options.pipeline, program.options.machine
    if collective.kind in ("send", "recv") and pipeline is not None:
        return stage_link(program)
    assert program.mesh is not None
    return machine.link(collective.axes, program.mesh)


def update_seconds(program: Program, names: Collection[str] | None = None) -> float:
    """The time of the optimizer's step, of all parameters or of the named ones.

    It reads and writes the parameters and their states, and reads the gradients.
    """
    gradients = results_by_parameter(program, "gradient")
    if names is not None:
        gradients = {name: node for name, node in gradients.items() if name in names}
    parameters = parameters_of(program)
    stored = sum(nbytes(program.local_type(parameters[name])) for name in gradients)
    read = sum(nbytes(gradient_type(program, *each)) for each in gradients.items())
    options, moved = program.options, 2 * (1 + OPTIMIZERS[program.options.optimizer]) * stored + read
    return options.machine.device.update_seconds(moved, options.offloads, options.in_files)
