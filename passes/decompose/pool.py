"""Pooling and resampling along a cut place, taken apart into windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.language.windows import EDGE, Windows

from .along import Along, Reach, Windowed

aten = torch.ops.aten


Number = dict[str, int]  # a pool's numbers for one dim, by the names of its arguments


def _numbers(along: Along, count: int) -> dict[str, list[int]]:
    """Kernel, stride, padding and dilation of each of the ``count`` places, as an op that gives fewer means them."""
    given = along.given

    def each(name: str, default: Sequence[int]) -> list[int]:
        value = given.get(name)
        numbers = [value] if isinstance(value, int) else list(value or default)
        return numbers * count if len(numbers) == 1 else numbers

    kernel = each("kernel_size", ())
    return {
        "kernel_size": kernel,
        "stride": each("stride", kernel),
        "padding": each("padding", [0] * count),
        "dilation": each("dilation", [1] * count),
    }


def _window(along: Along, count: int) -> Windows:
    """What the positions of a pool look at: those of the result, or of the gradient that comes in."""
    kernel, stride, padding, dilation = (along.at(numbers) for numbers in _numbers(along, count).values())
    large, small = along.given["self"], along.given.get("grad_output") or along.node
    span = (kernel - 1) * dilation + 1
    return Windows(along.count, along.size(large), along.size(small), -padding, stride, span)


def _reach(count: int) -> Reach:
    return lambda along: [(_window(along, count), along.emit.type(along.given["self"]))]


# Max pools. Indices count the elements of a plane, of the whole one before and behind, of a window between.


def _max_pool(op: Any, count: int) -> Callable[[Along], list[fx.Node | None]]:
    def expand(along: Along) -> list[fx.Node | None]:
        x, window, numbers = along.given["self"], _window(along, count), _numbers(along, count)
        low = -math.inf if along.emit.type(x).dtype.is_floating_point else torch.iinfo(along.emit.type(x).dtype).min
        padding = along.without(numbers["padding"])
        values, indices = along.emit.results(
            along.emit(
                op, along.windows(x, window, low), numbers["kernel_size"], numbers["stride"], padding,
                numbers["dilation"], along.given["ceil_mode"],
            )
        )  # fmt: skip
        assert values is not None and indices is not None
        whole = _moved(along, indices, window, count, window.size, along.size(x), 1)
        return [along.join(values, window.total), along.join(whole, window.total)]

    return expand


def _max_pool_backward(op: Any, count: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        given, x = along.given, along.given["self"]
        window, numbers = _window(along, count), _numbers(along, count)
        like = _like_windows(along, x, window)
        indices = _moved(along, along.chunks(given["indices"]), window, count, along.size(x), window.size, -1)
        last = math.prod(along.emit.shape(like)[-count:]) - 1
        indices = along.emit(aten.clamp.default, indices, 0, last)  # behind the last position there are none
        gradient = along.emit(
            op, along.chunks(given["grad_output"]), like, numbers["kernel_size"], numbers["stride"],
            along.without(numbers["padding"]), numbers["dilation"], given["ceil_mode"], indices,
        )  # fmt: skip
        return along.overlap_add(gradient, window)

    return expand


def _moved(along: Along, indices: fx.Node, window: Windows, count: int, old: int, new: int, sign: int) -> fx.Node:
    """Indices into planes whose dim has ``old`` elements, as of planes with ``new``, moved by each window's start."""
    emit, shape = along.emit, along.emit.shape(along.given["self"])
    behind = math.prod(shape[along.dim + 1 :])
    step = window.first(1) - window.first(0)
    starts = emit(aten.mul.Scalar, emit(aten.arange.default, along.count), sign * step * behind)
    starts = emit(aten.add.Scalar, starts, sign * window.first(0) * behind)
    moved = emit(aten.add.Tensor, indices, along.spread(starts, indices))
    if along.dim == len(shape) - count:
        return moved
    before = emit(aten.div.Scalar_mode, indices, old * behind, rounding_mode="floor")
    return emit(aten.add.Tensor, moved, emit(aten.mul.Scalar, before, (new - old) * behind))


def _like_windows(along: Along, x: fx.Node, window: Windows) -> fx.Node:
    """Of the shape that the windows of ``x`` have: an op wants it for its shape."""
    shape = list(along.emit.shape(x))
    shape[along.dim] = window.size
    shape[0] *= along.count
    return along.emit(aten.full.default, shape, 0, dtype=along.emit.type(x).dtype)


# Average pools: sums, divided by how many elements each position has where that differs.


def _average_pool(op: Any, count: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        x, numbers = along.given["self"], _numbers(along, count)
        window = _window(along, count)
        divisors, divisor = _divisors(along, count, along.node)
        result = along.emit(
            op, along.windows(x, window), numbers["kernel_size"], numbers["stride"], along.without(numbers["padding"]),
            along.given["ceil_mode"], True, divisor,
        )  # fmt: skip
        result = along.join(result, along.size(along.node))
        return result if divisors is None else along.emit(aten.div.Tensor, result, divisors)

    return expand


def _average_pool_backward(op: Any, count: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        x, numbers, gradient = along.given["self"], _numbers(along, count), along.given["grad_output"]
        window = _window(along, count)
        divisors, divisor = _divisors(along, count, gradient)
        if divisors is not None:
            gradient = along.emit(aten.div.Tensor, gradient, divisors)
        result = along.emit(
            op, along.chunks(gradient), _like_windows(along, x, window), numbers["kernel_size"], numbers["stride"],
            along.without(numbers["padding"]), along.given["ceil_mode"], True, divisor,
        )  # fmt: skip
        return along.overlap_add(result, window)

    return expand


def _divisors(along: Along, count: int, result: fx.Node) -> tuple[fx.Node | None, int]:
    """How many elements the mean at each position is of, and the one divisor of all; the former where they differ."""
    given, numbers = along.given, _numbers(along, count)
    if given["divisor_override"]:
        return None, given["divisor_override"]
    x, y = (along.emit.shape(node)[-count:] for node in (given["self"], result))
    counts = [
        _counts(along, size, out, {name: each[i] for name, each in numbers.items()})
        for i, (size, out) in enumerate(zip(x, y, strict=True))
    ]
    if all(isinstance(each, int) for each in counts):
        return None, math.prod(each for each in counts if isinstance(each, int))
    total: fx.Node | None = None
    for i, each in enumerate(counts):
        if isinstance(each, int):
            each = along.emit(aten.full.default, [y[i]], each, dtype=torch.int64)
        shaped = along.emit(aten.reshape.default, each, [-1, *[1] * (count - 1 - i)])
        total = shaped if total is None else along.emit(aten.mul.Tensor, total, shaped)
    return total, 1


def _counts(along: Along, size: int, out: int, numbers: Number) -> fx.Node | int:
    """How many elements each of ``out`` positions of one dim has; a number where all have as many."""
    emit, kernel, padding = along.emit, numbers["kernel_size"], numbers["padding"]
    counts_padding = along.given["count_include_pad"]
    low, high = (-padding, size + padding) if counts_padding else (0, size)
    if -padding >= low and (out - 1) * numbers["stride"] - padding + kernel <= high:
        return kernel
    starts = emit(aten.sub.Scalar, emit(aten.mul.Scalar, emit(aten.arange.default, out), numbers["stride"]), padding)
    ends = emit(aten.clamp.default, emit(aten.add.Scalar, starts, kernel), low, high)
    return emit(aten.sub.Tensor, ends, emit(aten.clamp.default, starts, low, high))


# Adaptive average pools and resampling, where every position has as many elements.


def _adaptive_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    window = _adaptive_window(along)
    return [(window, along.emit.type(along.given["self"]))] if window.span * window.total == window.length else []


def _adaptive_window(along: Along) -> Windows:
    large, small = (along.size(node) for node in (along.given["self"], along.given.get("grad_output") or along.node))
    return Windows(along.count, large, small, 0, large // small, large // small)


def _adaptive_pool(op: Any) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        window = _adaptive_window(along)
        sizes = along.without(along.given["output_size"], window.chunk)
        result = along.emit(op, along.windows(along.given["self"], window), sizes)
        return along.join(result, window.total)

    return expand


def _adaptive_pool_backward(op: Any) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        window = _adaptive_window(along)
        like = _like_windows(along, along.given["self"], window)
        return along.overlap_add(along.emit(op, along.chunks(along.given["grad_output"]), like), window)

    return expand


POOLS: dict[Any, Windowed] = {
    aten.max_pool2d_with_indices.default: Windowed(_reach(2), _max_pool(aten.max_pool2d_with_indices.default, 2)),
    aten.max_pool3d_with_indices.default: Windowed(_reach(3), _max_pool(aten.max_pool3d_with_indices.default, 3)),
    aten.max_pool2d_with_indices_backward.default: Windowed(
        _reach(2), _max_pool_backward(aten.max_pool2d_with_indices_backward.default, 2)
    ),
    aten.max_pool3d_with_indices_backward.default: Windowed(
        _reach(3), _max_pool_backward(aten.max_pool3d_with_indices_backward.default, 3)
    ),
    aten.avg_pool2d.default: Windowed(_reach(2), _average_pool(aten.avg_pool2d.default, 2)),
    aten.avg_pool3d.default: Windowed(_reach(3), _average_pool(aten.avg_pool3d.default, 3)),
    aten.avg_pool2d_backward.default: Windowed(_reach(2), _average_pool_backward(aten.avg_pool2d_backward.default, 2)),
    aten.avg_pool3d_backward.default: Windowed(_reach(3), _average_pool_backward(aten.avg_pool3d_backward.default, 3)),
    aten._adaptive_avg_pool2d.default: Windowed(_adaptive_reach, _adaptive_pool(aten._adaptive_avg_pool2d.default)),
    aten._adaptive_avg_pool2d_backward.default: Windowed(
        _adaptive_reach, _adaptive_pool_backward(aten._adaptive_avg_pool2d_backward.default)
    ),
}


def _sizes(along: Along) -> tuple[int, int]:
    """The size of the dim in the image and in the enlarged one."""
    given = along.given
    large = along.at(given["output_size"])
    return (along.size(given["self"]) if "self" in given else given["input_size"][along.dim]), large


def _image_window(along: Along, beside: int) -> Windows:
    """Of the image what each chunk of it is enlarged from: the chunk, and ``beside`` elements at either end."""
    size, _ = _sizes(along)
    return Windows(along.count, size, size, -beside, 1, 2 * beside + 1, EDGE)


def _enlarged_window(along: Along) -> Windows:
    """Of the enlarged image what each chunk of the image becomes."""
    size, large = _sizes(along)
    return Windows(along.count, large, size, 0, large // size, large // size)


def _resample_reach(beside: int) -> Reach:
    def reach(along: Along) -> list[tuple[Windows, TensorType]]:
        size, large = _sizes(along)
        node = along.node
        types = [along.emit.type(along.given.get("self", node)), along.emit.type(along.given.get("grad_output", node))]
        scale = along.given[along.at(_scales(along))]
        if large % size or scale not in (None, large / size) or along.given.get("align_corners"):
            return []
        return list(zip((_image_window(along, beside), _enlarged_window(along)), types, strict=True))

    return reach


def _scales(along: Along) -> list[str]:
    """The names of the arguments that are scales, one a place."""
    return [name for name in along.given if name.startswith("scales")]


def _arguments(along: Along, beside: int) -> tuple[list[int], list[Any]]:
    """The enlarged size of a window, and all arguments that follow it; the scale is that of the sizes."""
    given, (size, large) = along.given, _sizes(along)
    ours = along.at(_scales(along))
    scales = [None if name == ours else given[name] for name in _scales(along)]
    enlarged = _image_window(along, beside).size * (large // size)
    corners = [given["align_corners"]] if "align_corners" in given else []
    return along.without(given["output_size"], enlarged), [*corners, *scales]


def _edged(along: Along, x: fx.Node, edge: int) -> fx.Node:
    """With ``edge`` zeros at either end of the dim; less than none are cut off."""
    return along.padded(x, edge, edge) if edge else x


def _forward(op: Any, beside: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        size, rest = _arguments(along, beside)
        window, enlarged = _image_window(along, beside), _enlarged_window(along)
        result = along.emit(op, along.windows(along.given["self"], window), size, *rest)
        return along.overlap_add(_edged(along, result, -beside * enlarged.stride), enlarged)

    return expand


def _backward(op: Any, beside: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        size, rest = _arguments(along, beside)
        window, enlarged = _image_window(along, beside), _enlarged_window(along)
        gradient = _edged(along, along.windows(along.given["grad_output"], enlarged), beside * enlarged.stride)
        shape = along.without(along.given["input_size"], window.size)
        shape[0] *= along.count
        return along.overlap_add(along.emit(op, gradient, size, shape, *rest), window)

    return expand


def _entries() -> dict[Any, Windowed]:
    nearest = [f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)]
    linear = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    found: dict[Any, Windowed] = {}
    for name in nearest + linear:
        op, backward = (getattr(aten, f"{name}{suffix}").default for suffix in ("", "_backward"))
        beside = int(name in linear)
        found[op] = Windowed(_resample_reach(beside), _forward(op, beside))
        found[backward] = Windowed(_resample_reach(beside), _backward(backward, beside))
    return found


RESAMPLINGS = _entries()
