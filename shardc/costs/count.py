"""What a program costs: one rank's bytes by class, and floating-point operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import conv_flop_count, flop_registry

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.program.code_motion import is_early
from shardc.program.lifetime import Storage, is_row_of_kept, storages
from shardc.program.node import ancestors
from shardc.program.program import Program, Value, ends_of, parameters_of
from shardc.program.stages import Stage, has_stages

aten = torch.ops.aten

COUNTED_AS = {  # ops that torch has no formula for, by those that have the same operands
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
ADAM_STATES = 2  # exp_avg and exp_avg_sq, of the parameter's dtype: 8 bytes a local fp32 element


def memory_of(program: Program) -> dict[str, int]:
    """Bytes on one rank by class, of an annotated program or a later one.

    ``parameters``: as they are stored, and what is kept of them to compute on, shared bytes once. Of fp32 Adam two
    4 byte states are ``optimizer``; the 4 byte master that ZeRO's paper counts with them is a parameter here.
    ``gradients``: as they are before an optimizer's step; under stage 1 of ``Zero`` whole, since after the last
    backward alone they are summed over ranks. ``saved``: what forward made and backward uses. ``gathered``: the most of
    what is gathered of parameters for their uses and alive at a time, of two layers where layers are gathered ahead.
    ``peak``: the greatest sum of live values in the program, its inputs always alive, optimizer state left out.
    Of a pipeline it is the rank with the highest peak, once the program is lowered: see ``stage_memory``.
    """
    if has_stages(program):
        from shardc.costs.memory import stage_memory

        return stage_memory(program)
    parameters, live = parameters_of(program), list(storages(program))
    gathered = [storage for storage in live if is_gathered(program, storage.value[0], parameters)]
    return {
        **held(program),
        "saved": sum(storage.nbytes for storage in live if storage.is_saved),
        "gathered": max(alive(gathered).values(), default=0),
        "peak": max(alive(live).values(), default=0),
    }


def held(program: Program) -> dict[str, int]:
    """Bytes on one rank that stay between steps: parameters, gradients, and the states of Adam."""
    parameters = parameters_of(program)
    kept, gradients = of_parameters(program, "computed"), of_parameters(program, "gradient")
    rows = [name for name, node in kept.items() if is_row_of_kept(program, name, parameters[name], node)]
    apart = [node for name, node in parameters.items() if name not in rows]
    return {
        "parameters": sum(nbytes(program.local_type(node)) for node in (*apart, *kept.values())),
        "gradients": sum(nbytes(gradient_type(program, *each)) for each in gradients.items()),
        "optimizer": ADAM_STATES * sum(nbytes(program.local_type(parameters[name])) for name in gradients),
    }


def is_gathered(program: Program, node: fx.Node, parameters: Mapping[str, fx.Node]) -> bool:
    """Whether a value is gathered of parameters for a use."""
    is_used_up = is_early(node) and program.source(node).phase != "update"
    return is_used_up and not ancestors(node).isdisjoint(parameters.values())


def gradient_type(program: Program, name: str, node: fx.Node) -> TensorType | None:
    """One rank's part of a parameter's gradient between backwards."""
    zero = program.options.zero
    if zero is None or zero.stage != 1 or name not in program.computed:
        return program.local_type(node)
    shape = program.computed[name].local_shape(program.global_type(node).shape)
    return TensorType(shape, program.type(node).dtype)


def of_parameters(program: Program, kind: str) -> dict[str, fx.Node]:
    """The results of a kind that belong to parameters, by the names of these."""
    names = {node: name for name, node in parameters_of(program).items()}
    return {
        names[owner]: node
        for output, owner, node in ends_of(program)
        if output.kind == kind and owner in names and node is not None
    }


def nbytes(type_: TensorType | None) -> int:
    """Those of a value on one rank; none of what is no tensor."""
    return 0 if type_ is None else type_.nbytes


def bytes_moved(program: Program, node: fx.Node) -> int:
    """The bytes of a call's operands and results on one rank."""
    values: set[Value] = {program.value(read) for read in node.all_input_nodes}
    values |= {(node, i) for i, type_ in enumerate(program.types(node)) if type_ is not None}
    return sum(nbytes(program.local_type(*value)) for value in values)


def alive(live: Iterable[Storage]) -> dict[int, int]:
    """Bytes that live at each place of a program where something comes or goes."""
    change: Counter[int] = Counter()
    for storage in live:
        change[storage.born] += storage.nbytes
        change[storage.last + 1] -= storage.nbytes
    places = sorted(change)
    return dict(zip(places, accumulate(change[place] for place in places), strict=True))


def flops_of(program: Program, of_rank: bool = False) -> int:
    """Floating-point operations of contractions, convolutions and attentions, a multiply and an add being two.

    ``of_rank``: on one rank's shards; else on the types as they stand, which are global before localize.
    """
    if of_rank:
        return sum(flops_of_call(program, node) for node in program.calls)
    return sum(_node_flops(program, node, lambda node, index: program.types(node)[index]) for node in program.calls)


def flops_of_call(program: Program, node: fx.Node) -> int:
    """Those of one call, on one rank's shards."""
    return _node_flops(program, node, program.local_type)


Shape = tuple[int, ...]
TypeOf = Callable[[fx.Node, int], TensorType | None]


def _node_flops(program: Program, node: fx.Node, type_of: TypeOf) -> int:
    def operand(node: fx.Node) -> TensorType | None:
        return type_of(*program.value(node))

    if node.target is dot:
        a, b = operand(node.args[0]), operand(node.args[1])  # type: ignore[arg-type]
        assert a is not None and b is not None
        return dot_flops(a, b, str(node.args[2]))
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = OWN_FORMULAS.get(packet) or flop_registry.get(COUNTED_AS.get(packet, packet))
    if formula is None:
        return 0
    results = tuple(_shape(type_of(node, index)) for index in range(len(program.types(node))))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda node: _shape(operand(node)))
    found: int = formula(*args, **kwargs, out_val=results if program.has_many(node) else results[0])
    return found


def _convolution_backward_flops(grad: Shape, x: Shape, weight: Shape, *further: Any, out_val: Any) -> int:
    """As many as forward for each of the two gradients; torch's own formula leaves groups out."""
    is_transposed, mask = further[4], further[7]
    each: int = conv_flop_count(list(x), list(weight), list(grad), transposed=is_transposed)
    return (mask[0] + mask[1]) * each


OWN_FORMULAS: dict[Any, Callable[..., int]] = {aten.convolution_backward: _convolution_backward_flops}


def dot_flops(a: TensorType, b: TensorType, spec: str) -> int:
    """A multiply and an add for every combination of the factors."""
    names = spec.partition("->")[0].replace(",", " ").split()
    return 2 * math.prod(dict(zip(names, a.shape + b.shape, strict=True)).values())


def _shape(type_: TensorType | None) -> Shape | None:
    return None if type_ is None else type_.shape


def stored_bytes(program: Program, names: Collection[str]) -> dict[str, int]:
    """Bytes on one rank of a lowered or localized program of these parameters, their gradients and Adam's states."""
    nodes = parameters_of(program)
    gradients = {name: node for name, node in of_parameters(program, "gradient").items() if name in names}
    return {
        "parameters": sum(nbytes(program.local_type(nodes[name])) for name in names),
        "gradients": sum(nbytes(gradient_type(program, *each)) for each in gradients.items()),
        "optimizer": ADAM_STATES * sum(nbytes(program.local_type(nodes[name])) for name in gradients),
    }


def resident_bytes(program: Program, stages: Sequence[Stage], place: Sequence[int]) -> Iterator[int]:
    """For each stage all of that; what a rank's stages share counts at the first of them."""
    met: dict[int, set[str]] = {rank: set() for rank in place}
    for stage, rank in zip(stages, place, strict=True):
        yield sum(stored_bytes(program, set(stage.parameters) - met[rank]).values())
        met[rank] |= set(stage.parameters)
