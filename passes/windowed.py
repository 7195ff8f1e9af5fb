"""Ops that look at neighbours along a cut dim, taken apart: windows of the dim, work within each, and chunks joined.

A convolution over height cut in 4 needs of its neighbours the rows that its kernel reaches over::

    y: f32[2, 8, 16@tp, 16] = convolution(x, w)     # x: f32[2, 4, 16@tp, 16], 3 rows a kernel
        ->
    a: f32[2, 4, 24@tp, 16] = windows(x)            # 4 windows of 6 rows each: one row of each neighbour moves
    b: f32[8@tp, 4, 6, 16]  = a, its windows in front, as a part of the batch
    c: f32[8@tp, 8, 4, 16]  = convolution(b, w)
    y: f32[2, 8, 16@tp, 16] = c, its chunks behind one another
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.sharding import TensorType
from shardc.window import Windows, overlap_add, rows_sent, windows

from .emitter import Emitter

aten = torch.ops.aten

Results = fx.Node | list[fx.Node | None]


@dataclass(frozen=True, slots=True)
class Along:
    """An op to be taken apart along a dim that is cut in ``count`` chunks."""

    emit: Emitter
    dim: int
    count: int

    @property
    def given(self) -> dict[str, Any]:
        """The op's arguments."""
        return self.emit.given

    @property
    def place(self) -> int:
        """Which of the places it is, in tensors ``n c places``."""
        return self.dim - 2

    def size(self, node: fx.Node) -> int:
        """The size of the dim."""
        return self.emit.shape(node)[self.dim]

    def windows(self, x: fx.Node, window: Windows, fill: float = 0.0) -> fx.Node:
        """The windows of ``x``, in front as a part of the batch."""
        taken = x if window.is_identity else self.emit(windows, x, (), self.dim, window.values, fill)
        shape = list(self.emit.shape(taken))
        apart = [*shape[: self.dim], self.count, window.size, *shape[self.dim + 1 :]]
        order = [self.dim, *(i for i in range(len(apart)) if i != self.dim)]
        front = self.emit(aten.permute.default, self.emit(aten.reshape.default, taken, apart), order)
        shape = list(self.emit.shape(front))
        return self.emit(aten.reshape.default, front, [shape[0] * shape[1], *shape[2:]])

    def chunks(self, x: fx.Node, fill: float = 0.0) -> fx.Node:
        """The chunks of ``x``, in front as a part of the batch."""
        return self.windows(x, Windows(self.count, self.size(x), self.size(x), 0), fill)

    def overlap_add(self, x: fx.Node, window: Windows) -> fx.Node:
        """The adjoint of ``windows``: from windows in front, the dim of ``window.length`` elements."""
        shape = list(self.emit.shape(x))
        apart = self.emit(aten.reshape.default, x, [self.count, shape[0] // self.count, *shape[1:]])
        order = [*range(1, self.dim + 1), 0, *range(self.dim + 1, len(shape) + 1)]
        back = self.emit(aten.permute.default, apart, order)
        shape[0], shape[self.dim] = shape[0] // self.count, self.count * shape[self.dim]
        joined = self.emit(aten.reshape.default, back, shape)
        return joined if window.is_identity else self.emit(overlap_add, joined, (), self.dim, window.values)

    def join(self, x: fx.Node, size: int) -> fx.Node:
        """The inverse of ``chunks``, to a dim of ``size``."""
        return self.overlap_add(x, Windows(self.count, size, size, 0))


@dataclass(frozen=True, slots=True)
class Windowed:
    """How an op is taken apart: the windows that it takes, and of a tensor of which type; and what it becomes.

    ``reach`` is None where the op cannot be taken apart along the dim.
    """

    reach: Callable[[Along], tuple[Windows, TensorType] | None]
    expand: Callable[[Along], Results]

    def moved(self, along: Along) -> int | None:
        """Bytes that all ranks together send of the windowed tensor's edges."""
        found = self.reach(along)
        if found is None:
            return None
        window, type_ = found
        return sum(rows_sent(window.values)[0]) * (type_.nbytes // max(1, window.length))


# Convolution. Large is the side that windows are taken of: the input, or of a transposed convolution the result.


def _sides(along: Along, result: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The large and the small side of a convolution."""
    given = along.given["input"], result
    return given[::-1] if along.given["transposed"] else given


def _kernel_windows(along: Along, large: fx.Node, small: fx.Node) -> Windows:
    """The run of the large side that each chunk of the small side is made of, or spreads to."""
    given, i = along.given, along.place
    span = (along.size(given["weight"]) - 1) * given["dilation"][i] + 1
    return Windows(along.count, along.size(large), along.size(small), -given["padding"][i], given["stride"][i], span)


def _convolution_reach(along: Along) -> tuple[Windows, TensorType]:
    large, small = _sides(along, along.given.get("grad_output", along.emit.node))
    return _kernel_windows(along, large, small), along.emit.type(large)


def _convolution(along: Along) -> fx.Node:
    given, node = along.given, along.emit.node
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
        aten.convolution.default, x, given["weight"], bias, given["stride"], _without(along, given["padding"]),
        given["dilation"], given["transposed"], _without(along, given["output_padding"]), given["groups"],
    )  # fmt: skip


def _without(along: Along, numbers: Sequence[int]) -> list[int]:
    """The numbers of all places, 0 for the one that is taken apart."""
    return [0 if i == along.place else number for i, number in enumerate(numbers)]


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
            _without(along, given["padding"]), given["dilation"], given["transposed"],
            _without(along, given["output_padding"]), given["groups"], asked,
        )
    )  # fmt: skip
    if of_x is not None:
        of_x = along.join(of_x, along.size(small)) if given["transposed"] else along.overlap_add(of_x, window)
    if mask[2] and of_bias is None:  # in windows that overlap it would count twice
        dims = [i for i in range(len(emit.shape(large))) if i != 1]
        of_bias = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    return [of_x, of_weight, of_bias]


WINDOWED: dict[Any, Windowed] = {
    aten.convolution.default: Windowed(_convolution_reach, _convolution),
    aten.convolution_backward.default: Windowed(_convolution_reach, _convolution_backward),
}
