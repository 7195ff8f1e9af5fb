"""Convolutions along a cut spatial dim, taken apart into windows.

The *large* side is where windows are taken from: the input, or the result of a transposed convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType, ceil_div
from shardc.language.windows import Windows
from shardc.ops.windowed import sums_over_kernel

from .along import Along, Windowed

aten = torch.ops.aten


def _sides(along: Along, result: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The large and the small side of a convolution."""
    given = along.given["input"], result
    return given[::-1] if along.given["transposed"] else given


def _numbers(along: Along) -> tuple[int, int, int, int]:
    """Padding, stride and dilation along the dim, and the number of elements that the kernel spans."""
    padding, stride, dilation = (along.at(along.given[name]) for name in ("padding", "stride", "dilation"))
    return padding, stride, dilation, (along.size(along.given["weight"]) - 1) * dilation + 1


def _kernel_windows(along: Along, large: fx.Node, small: fx.Node) -> Windows:
    """The run of the large side that each chunk of the small side is computed from, or spreads to."""
    padding, stride, _, span = _numbers(along)
    return Windows(along.count, along.size(large), along.size(small), -padding, stride, span)


def _reach(along: Along) -> list[tuple[Windows, TensorType]]:
    given, is_backward = along.given, "grad_output" in along.given
    result = given.get("grad_output", along.node)
    if sums_over_kernel(along.size(given["weight"]), along.size(result), given["transposed"]):
        return [] if is_backward else [(_summed_windows(along), along.emit.type(given["input"]))]
    spread = _spread_windows(along) if given["transposed"] and not is_backward else None
    if spread is not None:
        return [(spread, along.emit.type(given["input"]))]
    large, small = _sides(along, result)
    return [(_kernel_windows(along, large, small), along.emit.type(large))]


def _convolution(along: Along) -> fx.Node:
    given, node = along.given, along.node
    if sums_over_kernel(along.size(given["weight"]), along.size(node), given["transposed"]):
        kernel = along.chunks_of(along.size(given["weight"]))
        x = _into_channels(along, along.apart(given["input"], _summed_windows(along)), given["groups"])
        result = _convolved(along, x, _into_channels(along, along.apart(given["weight"], kernel), 1))
    elif given["transposed"]:
        result = _transposed(along)
    else:
        window = _kernel_windows(along, given["input"], node)
        return along.join(_convolved(along, along.windows(given["input"], window), bias=given["bias"]), window.total)
    if given["bias"] is None:
        return result
    bias = along.emit(aten.reshape.default, given["bias"], [-1, *[1] * (along.ndim - 2)])
    return along.emit(aten.add.Tensor, result, bias)  # not within the op, where every rank would add it


def _convolved(along: Along, x: fx.Node, weight: fx.Node | None = None, bias: fx.Node | None = None) -> fx.Node:
    """The convolution of these tensors, without padding along the dim."""
    given = along.given
    return along.emit(
        aten.convolution.default, x, weight or given["weight"], bias, given["stride"], along.without(given["padding"]),
        given["dilation"], given["transposed"], along.without(given["output_padding"]), given["groups"],
    )  # fmt: skip


# A transposed convolution. If chunks of the result are multiples of the stride, each is computed from a window of the
# input; else the runs that chunks of the input spread to are added where they overlap.


def _transposed(along: Along) -> fx.Node:
    x, size = along.given["input"], along.size(along.node)
    window = _spread_windows(along)
    if window is None:
        return along.overlap_add(_convolved(along, along.chunks(x)), _kernel_windows(along, along.node, x))
    padding, stride, _, _ = _numbers(along)
    result = _convolved(along, along.windows(x, window))
    first = padding - window.start * stride
    behind = first + window.chunk * stride - along.size(result)
    return along.join(along.padded(result, -first, behind), size)


def _spread_windows(along: Along) -> Windows | None:
    """The windows of the input that chunks of the result are computed from; None if chunks do not fit the stride.

    A position is a run of ``stride`` elements of the result.
    """
    padding, stride, _, span = _numbers(along)
    size = along.size(along.node)
    start = ceil_div(padding - span + 1, stride)
    reach = (stride - 1 + padding) // stride - start + 1
    if ceil_div(size, along.count) % stride or reach < 1:
        return None
    return Windows(along.count, along.size(along.given["input"]), ceil_div(size, stride), start, 1, reach)


# A kernel larger than the result, as in the gradient of a weight: each rank sums over its chunk of the kernel. The dim
# over chunks becomes a part of the input's channels.


def _summed_windows(along: Along) -> Windows:
    padding, stride, dilation, _ = _numbers(along)
    span = (along.size(along.node) - 1) * stride + 1
    x, weight = along.given["input"], along.given["weight"]
    return Windows(along.count, along.size(x), along.size(weight), -padding, dilation, span)


def _into_channels(along: Along, apart: fx.Node, groups: int) -> fx.Node:
    """The dim over windows as the major part of the channels of each group."""
    batch, channels, *rest = along.emit.shape(apart)
    grouped = along.emit(aten.reshape.default, apart, [batch, groups, channels // groups, *rest])
    order = [0, 1, along.dim + 1, *(i for i in range(2, len(rest) + 3) if i != along.dim + 1)]
    del rest[along.dim - 2]
    return along.merge(grouped, order, [batch, channels * along.count, *rest])


# The gradients.


def _convolution_backward(along: Along) -> list[fx.Node | None]:
    """The three gradients. Windows beyond the last position have none, so they add nothing to that of the weight."""
    given, emit = along.given, along.emit
    large, small = _sides(along, given["grad_output"])
    window = _kernel_windows(along, large, small)
    pieces = along.windows(large, window), along.chunks(small)
    x, gradient = pieces[::-1] if given["transposed"] else pieces
    mask = list(given["output_mask"])
    inner_mask = [mask[0], mask[1], mask[2] and not given["transposed"]]
    of_x, of_weight, of_bias = emit.results(
        emit(
            aten.convolution_backward.default, gradient, x, given["weight"], given["bias_sizes"], given["stride"],
            along.without(given["padding"]), given["dilation"], given["transposed"],
            along.without(given["output_padding"]), given["groups"], inner_mask,
        )
    )  # fmt: skip
    if of_x is not None:
        of_x = along.join(of_x, along.size(small)) if given["transposed"] else along.overlap_add(of_x, window)
    if mask[2] and of_bias is None:  # overlapping windows would count it twice
        dims = [i for i in range(len(emit.shape(large))) if i != 1]
        of_bias = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    return [of_x, of_weight, of_bias]


CONVOLUTIONS: dict[Any, Windowed] = {
    aten.convolution.default: Windowed(_reach, _convolution),
    aten.convolution_backward.default: Windowed(_reach, _convolution_backward),
}
