"""Floating-point operations of a program and of its calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import conv_flop_count, flop_registry

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.program.program import Program

aten = torch.ops.aten

COUNTED_AS = {  # op without a formula in torch: the op with the same operands whose formula is used
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
        return sum(flops_of_call(program, node) for node in program.calls)
    return sum(_flops(program, node, lambda node, index: program.types(node)[index]) for node in program.calls)


def flops_of_call(program: Program, node: fx.Node) -> int:
    """Operations of one call on one rank's shards."""
    return _flops(program, node, program.local_type)


def _flops(program: Program, node: fx.Node, type_of: TypeOf) -> int:
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = OWN_FORMULAS.get(packet) or flop_registry.get(COUNTED_AS.get(packet, packet))
    if formula is None and node.target is not dot:
        return 0
    operands: Any = fx.map_arg((node.args, node.kwargs), lambda node: _shape(type_of(*program.value(node))))
    args, kwargs = operands
    if formula is None:  # a multiply and an add for every combination of the factors
        a, b, spec = args
        names = spec.partition("->")[0].replace(",", " ").split()
        return 2 * math.prod(dict(zip(names, a + b, strict=True)).values())
    results = tuple(_shape(type_of(node, index)) for index in range(len(program.types(node))))
    flops: int = formula(*args, **kwargs, out_val=results if program.has_many(node) else results[0])
    return flops


def _shape(type_: TensorType | None) -> Shape | None:
    return None if type_ is None else type_.shape


def _convolution_backward_flops(grad: Shape, x: Shape, weight: Shape, *further: Any, out_val: Any) -> int:
    """As many as in forward for each of the two gradients; torch's formula ignores groups."""
    is_transposed, mask = further[4], further[7]
    each: int = conv_flop_count(list(x), list(weight), list(grad), transposed=is_transposed)
    return (mask[0] + mask[1]) * each


OWN_FORMULAS: dict[Any, Callable[..., int]] = {aten.convolution_backward: _convolution_backward_flops}
