"""Convolutions along a cut place, taken apart into windows.

Large is the side that windows are taken of: the input, or of a transposed convolution the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.sharding import TensorType
from shardc.window import Windows

from .along import Along, Windowed

aten = torch.ops.aten


def _sides(along: Along, result: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The large and the small side of a convolution."""
    given = along.given["input"], result
    return given[::-1] if along.given["transposed"] else given


def _kernel_windows(along: Along, large: fx.Node, small: fx.Node) -> Windows:
    """The run of the large side that each chunk of the small side is made of, or spreads to."""
    padding, stride, dilation = (along.at(along.given[name]) for name in ("padding", "stride", "dilation"))
    span = (along.size(along.given["weight"]) - 1) * dilation + 1
    return Windows(along.count, along.size(large), along.size(small), -padding, stride, span)


def _reach(along: Along) -> tuple[Windows, TensorType]:
    large, small = _sides(along, along.given.get("grad_output", along.node))
    return _kernel_windows(along, large, small), along.emit.type(large)


def _convolution(along: Along) -> fx.Node:
    given, node = along.given, along.node
    large, small = _sides(along, node)
    window = _kernel_windows(along, large, small)
    if not given["transposed"]:
        return along.join(_convolved(along, along.windows(large, window), given["bias"]), along.size(node))
    result = along.overlap_add(_convolved(along, along.chunks(small), None), window)
    if given["bias"] is None:
        return result
    spread = along.emit(aten.reshape.default, given["bias"], [-1, *[1] * (len(along.emit.shape(node)) - 2)])
    return along.emit(aten.add.Tensor, result, spread)


def _convolved(along: Along, x: fx.Node, bias: fx.Node | None) -> fx.Node:
    given = along.given
    return along.emit(
        aten.convolution.default, x, given["weight"], bias, given["stride"], along.without(given["padding"]),
        given["dilation"], given["transposed"], along.without(given["output_padding"]), given["groups"],
    )  # fmt: skip


def _convolution_backward(along: Along) -> list[fx.Node | None]:
    """Windows beyond the last position have no gradient, so that they add nothing to the weight's."""
    given, emit = along.given, along.emit
    large, small = _sides(along, given["grad_output"])
    window = _kernel_windows(along, large, small)
    pieces = along.windows(large, window), along.chunks(small)
    x, gradient = pieces[::-1] if given["transposed"] else pieces
    mask = list(given["output_mask"])
    asked = [mask[0], mask[1], mask[2] and not given["transposed"]]
    of_x, of_weight, of_bias = emit.results(
        emit(
            aten.convolution_backward.default, gradient, x, given["weight"], given["bias_sizes"], given["stride"],
            along.without(given["padding"]), given["dilation"], given["transposed"],
            along.without(given["output_padding"]), given["groups"], asked,
        )
    )  # fmt: skip
    if of_x is not None:
        of_x = along.join(of_x, along.size(small)) if given["transposed"] else along.overlap_add(of_x, window)
    if mask[2] and of_bias is None:  # in windows that overlap it would count twice
        dims = [i for i in range(len(emit.shape(large))) if i != 1]
        of_bias = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    return [of_x, of_weight, of_bias]


CONVOLUTIONS: dict[Any, Windowed] = {
    aten.convolution.default: Windowed(_reach, _convolution),
    aten.convolution_backward.default: Windowed(_reach, _convolution_backward),
}
