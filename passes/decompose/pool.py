"""Pooling and resampling along a cut spatial dim, taken apart into windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.language.windows import EDGE, Windows

from .along import Along, Windowed, windowed

aten = torch.ops.aten


def _numbers(count: int, along: Along) -> dict[str, list[int]]:
    """Kernel, stride, padding and dilation of each of the ``count`` spatial dims, with the op's defaults filled in."""

    def for_places(name: str, default: Sequence[int]) -> list[int]:
        value = along.given.get(name)
        numbers = [value] if isinstance(value, int) else list(value or default)
        return numbers * count if len(numbers) == 1 else numbers

    kernel, zeros, ones = for_places("kernel_size", ()), [0] * count, [1] * count
    defaults = {"kernel_size": kernel, "stride": kernel, "padding": zeros, "dilation": ones}
    return {name: for_places(name, default) for name, default in defaults.items()}


def _window(count: int, along: Along) -> Windows:
    """The windows that the positions of a pool read. Positions are those of the result, or of the incoming gradient."""
    kernel, stride, padding, dilation = (along.at(numbers) for numbers in _numbers(count, along).values())
    large, small = along.given["self"], along.given.get("grad_output", along.node)
    span = (kernel - 1) * dilation + 1
    return Windows(along.count, along.size(large), along.size(small), -padding, stride, span)


# Max pools. Indices count the elements of a plane: of a window inside the op on windows, of the whole plane elsewhere.


def _max_pool(count: int, along: Along, window: Windows) -> list[fx.Node | None]:
    x, (kernel, stride, padding, dilation) = along.given["self"], _numbers(count, along).values()
    type_, padding = along.emit.type(x), along.without(padding)
    low = -math.inf if type_.dtype.is_floating_point else torch.iinfo(type_.dtype).min
    pieces = along.windows(x, window, low)
    pools = along.emit(along.node.target, pieces, kernel, stride, padding, dilation, along.given["ceil_mode"])
    values, indices = along.emit.results(pools)
    assert values is not None and indices is not None
    whole = _moved(count, along, indices, window, window.size, along.size(x), 1)
    return [along.join(values, window.total), along.join(whole, window.total)]


def _max_pool_backward(count: int, along: Along, window: Windows) -> fx.Node:
    given, (kernel, stride, padding, dilation) = along.given, _numbers(count, along).values()
    like = _like_windows(along, window)
    indices = _moved(count, along, along.chunks(given["indices"]), window, window.length, window.size, -1)
    last = math.prod(along.emit.shape(like)[-count:]) - 1
    indices = along.emit(aten.clamp.default, indices, 0, last)  # beyond the last position there are none
    arguments = (kernel, stride, along.without(padding), dilation, given["ceil_mode"], indices)
    gradient = along.emit(along.node.target, along.chunks(given["grad_output"]), like, *arguments)
    return along.overlap_add(gradient, window)


def _moved(count: int, along: Along, indices: fx.Node, window: Windows, old: int, new: int, sign: int) -> fx.Node:
    """Convert indices into planes whose dim has ``old`` elements to planes with ``new``, moved by each window's start.

    ``sign``: 1 moves from a window to the whole dim, -1 back.
    """
    emit, shape = along.emit, along.emit.shape(along.given["self"])
    behind = math.prod(shape[along.dim + 1 :])
    step = window.first(1) - window.first(0)
    starts = emit(aten.mul.Scalar, emit(aten.arange.default, along.count), sign * step * behind)
    starts = emit(aten.add.Scalar, starts, sign * window.first(0) * behind)
    batch, *rest = emit.shape(indices)  # of all windows
    column = emit(aten.reshape.default, starts, [along.count, 1])
    spread = emit(aten.expand.default, column, [along.count, batch // along.count])
    starts = emit(aten.reshape.default, spread, [batch, *[1] * len(rest)])
    result = emit(aten.add.Tensor, indices, starts)
    if along.dim == len(shape) - count:
        return result
    before = emit(aten.div.Scalar_mode, indices, old * behind, rounding_mode="floor")
    return emit(aten.add.Tensor, result, emit(aten.mul.Scalar, before, (new - old) * behind))


def _like_windows(along: Along, window: Windows) -> fx.Node:
    """A tensor in the shape of the input's windows, of which a backward reads only the shape."""
    x = along.given["self"]
    shape = along.without(along.emit.shape(x), window.size)
    shape[0] *= along.count
    return along.emit(aten.full.default, shape, 0, dtype=along.emit.type(x).dtype)


# Average pools: sums, divided by the number of elements of each position if that differs.


def _average_pool(count: int, along: Along, window: Windows) -> fx.Node:
    """The pool, or its backward if the op reads a gradient."""
    given, (kernel, stride, padding, _) = along.given, _numbers(count, along).values()
    gradient = given.get("grad_output")
    divisors, divisor = _divisors(count, along, along.node if gradient is None else gradient)
    arguments = (kernel, stride, along.without(padding), given["ceil_mode"], True, divisor)
    if gradient is None:
        result = along.emit(along.node.target, along.windows(given["self"], window), *arguments)
        result = along.join(result, window.total)
        return result if divisors is None else along.emit(aten.div.Tensor, result, divisors)
    if divisors is not None:
        gradient = along.emit(aten.div.Tensor, gradient, divisors)
    result = along.emit(along.node.target, along.chunks(gradient), _like_windows(along, window), *arguments)
    return along.overlap_add(result, window)


def _divisors(count: int, along: Along, result: fx.Node) -> tuple[fx.Node | None, int]:
    """The number of elements averaged at each position, None if all are equal; and the one divisor of all positions."""
    given, numbers = along.given, _numbers(count, along)
    if given["divisor_override"]:
        return None, given["divisor_override"]
    sizes, totals = (along.emit.shape(node)[-count:] for node in (given["self"], result))
    counts = [
        _counts(along, size, total, kernel, stride, padding)
        for size, total, kernel, stride, padding, _ in zip(sizes, totals, *numbers.values(), strict=True)
    ]
    if all(isinstance(elements, int) for elements in counts):
        return None, math.prod(elements for elements in counts if isinstance(elements, int))
    product: fx.Node | None = None
    for i, elements in enumerate(counts):
        if isinstance(elements, int):
            elements = along.emit(aten.full.default, [totals[i]], elements, dtype=torch.int64)
        shaped = along.emit(aten.reshape.default, elements, [-1, *[1] * (count - 1 - i)])
        product = shaped if product is None else along.emit(aten.mul.Tensor, product, shaped)
    return product, 1


def _counts(along: Along, size: int, total: int, kernel: int, stride: int, padding: int) -> fx.Node | int:
    """The number of elements of each of ``total`` positions of one dim; an int if all are equal."""
    emit = along.emit
    low, high = (-padding, size + padding) if along.given["count_include_pad"] else (0, size)
    if -padding >= low and (total - 1) * stride - padding + kernel <= high:
        return kernel
    starts = emit(aten.sub.Scalar, emit(aten.mul.Scalar, emit(aten.arange.default, total), stride), padding)
    ends = emit(aten.clamp.default, emit(aten.add.Scalar, starts, kernel), low, high)
    return emit(aten.sub.Tensor, ends, emit(aten.clamp.default, starts, low, high))


# Adaptive average pools and resampling, if every position has the same number of elements.


def _adaptive_window(along: Along) -> Windows | None:
    large, small = (along.size(node) for node in (along.given["self"], along.given.get("grad_output", along.node)))
    span = large // small
    return Windows(along.count, large, small, 0, span, span) if span * small == large else None


def _adaptive_pool(along: Along, window: Windows) -> fx.Node:
    given, op = along.given, along.node.target
    if "grad_output" in given:
        like = _like_windows(along, window)
        return along.overlap_add(along.emit(op, along.chunks(given["grad_output"]), like), window)
    sizes = along.without(given["output_size"], window.chunk)
    return along.join(along.emit(op, along.windows(given["self"], window), sizes), window.total)


def _pools() -> dict[Any, Windowed]:
    forms: dict[str, Callable[[int, Along, Windows], fx.Node | list[fx.Node | None]]] = {
        "max_pool{}d_with_indices": _max_pool,
        "max_pool{}d_with_indices_backward": _max_pool_backward,
        "avg_pool{}d": _average_pool,
        "avg_pool{}d_backward": _average_pool,
    }
    return {
        getattr(aten, name.format(count)).default: windowed(partial(_window, count), partial(expand, count))
        for count in (2, 3)
        for name, expand in forms.items()
    }


POOLS: dict[Any, Windowed] = {
    **_pools(),
    aten._adaptive_avg_pool2d.default: windowed(_adaptive_window, _adaptive_pool),
    aten._adaptive_avg_pool2d_backward.default: windowed(_adaptive_window, _adaptive_pool),
}


def _resample_windows(beside: int, along: Along) -> tuple[Windows, Windows]:
    """The windows of the image that chunks are enlarged from, and those of the enlarged image that they become.

    A result depends on the element at its place and on ``beside`` elements at either side.
    """
    given = along.given
    size = along.size(given["self"]) if "self" in given else given["input_size"][along.dim]
    large = along.at(given["output_size"])
    image = Windows(along.count, size, size, -beside, 1, 2 * beside + 1, EDGE)
    return image, Windows(along.count, large, size, 0, large // size, large // size)


def _scales(along: Along) -> list[str]:
    """The names of the scale arguments, one for each spatial dim."""
    return [name for name in along.given if name.startswith("scales")]


def _resample_reach(beside: int, along: Along) -> list[tuple[Windows, TensorType]]:
    given, (image, enlarged) = along.given, _resample_windows(beside, along)
    scale = given[along.at(_scales(along))]
    is_uneven = enlarged.length % image.length or scale not in (None, enlarged.length / image.length)
    if is_uneven or given.get("align_corners"):
        return []
    image_type, enlarged_type = (along.emit.type(given.get(name, along.node)) for name in ("self", "grad_output"))
    return [(image, image_type), (enlarged, enlarged_type)]


def _resample(beside: int, along: Along) -> fx.Node:
    """The op on windows, with the enlarged edges cut off; in backward, with edges of zeros around the gradient."""
    given, emit, names = along.given, along.emit, _scales(along)
    image, enlarged = _resample_windows(beside, along)
    sizes, edge = along.without(given["output_size"], image.size * enlarged.stride), beside * enlarged.stride
    corners = [given["align_corners"]] if "align_corners" in given else []
    scales = [None if name == along.at(names) else given[name] for name in names]  # None: as the sizes say
    if "grad_output" in given:
        gradient = along.windows(given["grad_output"], enlarged)
        gradient = along.padded(gradient, edge, edge) if edge else gradient
        shape = along.without(given["input_size"], image.size)
        shape[0] *= along.count
        return along.overlap_add(emit(along.node.target, gradient, sizes, shape, *corners, *scales), image)
    result = emit(along.node.target, along.windows(given["self"], image), sizes, *corners, *scales)
    return along.overlap_add(along.padded(result, -edge, -edge) if edge else result, enlarged)


def _resamplings() -> dict[Any, Windowed]:
    linear = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    nearest = [f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)]
    return {
        getattr(aten, f"{name}{suffix}").default: Windowed(partial(_resample_reach, beside), partial(_resample, beside))
        for beside, names in enumerate((nearest, linear))
        for name in names
        for suffix in ("", "_backward")
    }


RESAMPLINGS = _resamplings()
