"""A convolution's bias is added after it: were it inside, every rank with some of the input's channels would add it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.program import Program

from .emitter import Emitter, Results, Rewrite

aten = torch.ops.aten


def _convolution(program: Program, node: fx.Node) -> Results:
    emit = Emitter(program, node)
    given = emit.given
    bias = given["bias"]
    if bias is None:
        return None
    result = emit(node.target, *(given | {"bias": None}).values())
    channels = [emit.shape(bias)[0], *[1] * (len(emit.shape(result)) - 2)]
    return emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, channels))


def _convolution_backward(program: Program, node: fx.Node) -> Results:
    """The bias's gradient is a sum of its own."""
    emit = Emitter(program, node)
    given = emit.given
    of_x, of_weight, of_bias = given["output_mask"]
    if not of_bias:
        return None
    dims = [dim for dim in range(len(emit.shape(given["grad_output"]))) if dim != 1]
    summed = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    if not (of_x or of_weight):
        return None, None, summed
    without = given | {"bias_sizes": None, "output_mask": [of_x, of_weight, False]}
    found = emit.results(emit(node.target, *without.values()))
    return found[0], found[1], summed


CONVOLUTIONS: dict[Any, Rewrite] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
