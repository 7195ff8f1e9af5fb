"""Ops that move elements along a cut dim, taken apart into windows: slices, padding, rolls, flips, concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.language.windows import AROUND, EDGE, MIRRORED, Windows

from .along import Along, Reach, Windowed

aten = torch.ops.aten


BLOCKS = "blk"


def _reach(window_of: Callable[[Along], Windows]) -> Reach:
    return lambda along: [(window_of(along), along.emit.type(_input(along)))]


def _input(along: Along) -> fx.Node:
    found: fx.Node = along.given["self"]
    return found


# Slices.


def _bounds(along: Along, size: int) -> tuple[int, int, int]:
    """Start, end and step within a dim of ``size``."""
    given = along.given
    return slice(given["start"], given["end"], given["step"]).indices(size)


def _slice_window(along: Along, large: int) -> Windows:
    start, end, step = _bounds(along, large)
    return Windows(along.count, large, len(range(start, end, step)), start, step)


def _slice(along: Along) -> fx.Node:
    window = _slice_window(along, along.size(_input(along)))
    taken = along.apart(_input(along), window)
    if window.stride > 1:
        taken = along.emit(aten.slice.Tensor, taken, along.dim + 1, 0, window.size, window.stride)
    return along.beside(taken, window.total)


def _slice_backward_window(along: Along) -> Windows:
    return _slice_window(along, along.given["input_sizes"][along.dim])


def _slice_backward(along: Along) -> fx.Node:
    window, gradient = _slice_backward_window(along), along.given["grad_output"]
    chunks = along.apart(gradient, along.chunks_of(window.total))
    shape = list(along.emit.shape(chunks))
    shape[along.dim + 1] = window.size
    if window.stride > 1:
        chunks = along.emit(aten.slice_backward.default, chunks, shape, along.dim + 1, 0, window.size, window.stride)
    shape[along.dim : along.dim + 2] = [along.count * window.size]
    return along.added(along.emit(aten.reshape.default, chunks, shape), window)


def _slice_scatter_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    start, end, step = _bounds(along, along.size(_input(along)))
    window = Windows(along.count, end - start, along.size(_input(along)), -start)
    return [(window, along.emit.type(along.given["src"]))] if step == 1 else []


def _slice_scatter(along: Along) -> fx.Node:
    """What is put, padded to the whole, where it belongs."""
    emit, x = along.emit, _input(along)
    start, end, _ = _bounds(along, along.size(x))
    padded = along.padded(along.given["src"], start, along.size(x) - end)
    place = _places(along, along.size(x))
    inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, place, start), emit(aten.lt.Scalar, place, end))
    return emit(aten.where.self, inside, padded, x)


def _places(along: Along, size: int) -> fx.Node:
    """The numbers of the elements of the dim, to be compared with."""
    shape = [-1, *[1] * (along.ndim - 1 - along.dim)]
    return along.emit(aten.reshape.default, along.emit(aten.arange.default, size), shape)


def _split(along: Along) -> list[fx.Node | None]:
    """The pieces as slices, each to be taken apart by itself."""
    x, ends = _input(along), [0]
    for type_ in along.emit.program.types(along.node):
        assert type_ is not None
        ends.append(ends[-1] + type_.shape[along.dim])
    return [along.emit(aten.slice.Tensor, x, along.dim, start, end) for start, end in pairwise(ends)]


def _split_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    found, start, type_ = [], 0, along.emit.type(_input(along))
    for piece in along.emit.program.types(along.node):
        assert piece is not None
        found.append((Windows(along.count, type_.shape[along.dim], piece.shape[along.dim], start), type_))
        start += piece.shape[along.dim]
    return found


# Concatenation: each piece is padded to the whole, and each element taken from its own.


def _cat_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    found, start, total = [], 0, along.size(along.node)
    for piece in along.given["tensors"]:
        found.append((Windows(along.count, along.size(piece), total, -start), along.emit.type(piece)))
        start += along.size(piece)
    return found


def _cat(along: Along) -> fx.Node:
    total, end = along.size(along.node), 0
    place = _places(along, total)
    result: fx.Node | None = None
    for piece in along.given["tensors"]:
        start, end = end, end + along.size(piece)
        padded = along.padded(piece, start, total - end)
        before = along.emit(aten.lt.Scalar, place, start)
        result = padded if result is None else along.emit(aten.where.self, before, result, padded)
    assert result is not None
    return result


# Padding, with a number, the edge or a mirror image.


def _edges(along: Along, name: str) -> tuple[int, int]:
    """How much is added before and after the dim."""
    pads, at = along.given[name], 2 * (along.ndim - 1 - along.dim)
    return (pads[at], pads[at + 1]) if at < len(pads) else (0, 0)


def _others(along: Along, name: str) -> list[int]:
    """The padding of all other dims."""
    at = 2 * (along.ndim - 1 - along.dim)
    return [0 if i in (at, at + 1) else pad for i, pad in enumerate(along.given[name])]


def _pad_window(name: str, beyond: int = 0) -> Callable[[Along], Windows]:
    def window(along: Along) -> Windows:
        before, after = _edges(along, name)
        size = along.size(_input(along))
        return Windows(along.count, size, before + size + after, -before, beyond=beyond)

    return window


def _constant_pad(along: Along) -> fx.Node:
    value, window = along.given["value"], _pad_window("pad")(along)
    padded = along.beside(along.apart(_input(along), window, value), window.total)
    others = _others(along, "pad")
    return along.emit(aten.constant_pad_nd.default, padded, others, value) if any(others) else padded


def _reflecting(op: Any, beyond: int) -> Windowed:
    window_of = _pad_window("padding", beyond)

    def expand(along: Along) -> fx.Node:
        window, others = window_of(along), _others(along, "padding")
        padded = along.beside(along.apart(_input(along), window), window.total)
        return along.emit(op, padded, others) if any(others) else padded

    return Windowed(_reach(window_of), expand)


def _reflecting_backward(op: Any, beyond: int) -> Windowed:
    window_of = _pad_window("padding", beyond)

    def expand(along: Along) -> fx.Node:
        window, others, gradient = window_of(along), _others(along, "padding"), along.given["grad_output"]
        chunks = along.apart(gradient, along.chunks_of(window.total))
        shape = list(along.emit.shape(gradient))
        shape[along.dim] = along.count * window.size
        back = along.added(along.emit(aten.reshape.default, chunks, shape), window)
        return along.emit(op, back, _input(along), others) if any(others) else back

    return Windowed(_reach(window_of), expand)


# Rolls and flips.


def _roll_window(along: Along) -> Windows:
    given, size = along.given, along.size(_input(along))
    shift = sum(by for dim, by in zip(given["dims"], given["shifts"], strict=True) if dim % along.ndim == along.dim)
    return Windows(along.count, size, size, -shift % max(1, size), beyond=AROUND)


def _roll_reach(along: Along) -> Sequence[tuple[Windows, TensorType]]:
    return _reach(_roll_window)(along) if along.given["dims"] else []


def _roll(along: Along) -> fx.Node:
    given, window = along.given, _roll_window(along)
    rolled = along.beside(along.apart(_input(along), window), window.total)
    others = [
        (by, dim) for dim, by in zip(given["dims"], given["shifts"], strict=True) if dim % along.ndim != along.dim
    ]
    return along.emit(aten.roll.default, rolled, *map(list, zip(*others, strict=True))) if others else rolled


def _flip_window(along: Along) -> Windows:
    size = along.size(_input(along))
    return Windows(along.count, size, size, size - 1, -1)


def _flip(along: Along) -> fx.Node:
    """Chunks change places, and each is flipped."""
    window = _flip_window(along)
    taken = along.apart(_input(along), window)
    flipped = along.beside(along.emit(aten.flip.default, taken, [along.dim + 1]), window.total)
    others = [dim for dim in along.given["dims"] if dim % along.ndim != along.dim]
    return along.emit(aten.flip.default, flipped, others) if others else flipped


# Sliding windows as a dim of their own.


def _unfold_window(along: Along) -> Windows:
    given, x = along.given, _input(along)
    return Windows(along.count, along.size(x), along.size(along.node), 0, given["step"], given["size"])


def _unfold(along: Along) -> fx.Node:
    window, given = _unfold_window(along), along.given
    unfolded = along.emit(
        aten.unfold.default, along.apart(_input(along), window), along.dim + 1, given["size"], given["step"]
    )
    return along.beside(unfolded, window.total)


def _unfold_backward_window(along: Along) -> Windows:
    given = along.given
    size, gradient = given["input_sizes"][along.dim], given["grad_in"]
    return Windows(along.count, size, along.size(gradient), 0, given["step"], given["size"])


def _unfold_backward(along: Along) -> fx.Node:
    window, given = _unfold_backward_window(along), along.given
    chunks = along.apart(given["grad_in"], along.chunks_of(window.total))
    shape = list(along.emit.shape(chunks))[:-1]
    shape[along.dim + 1] = window.size
    back = along.emit(aten.unfold_backward.default, chunks, shape, along.dim + 1, given["size"], given["step"])
    shape[along.dim : along.dim + 2] = [along.count * window.size]
    return along.added(along.emit(aten.reshape.default, back, shape), window)


def _pads(ndim: int) -> dict[Any, Windowed]:
    """Padding of the last ``ndim`` dims by the input's own values, and back."""
    found: dict[Any, Windowed] = {}
    for name, beyond in (("reflection_pad", MIRRORED), ("replication_pad", EDGE)):
        op, backward = (getattr(aten, f"{name}{ndim}d{suffix}").default for suffix in ("", "_backward"))
        found |= {op: _reflecting(op, beyond), backward: _reflecting_backward(backward, beyond)}
    return found


SHIFTS: dict[Any, Windowed] = {
    aten.slice.Tensor: Windowed(_reach(lambda along: _slice_window(along, along.size(_input(along)))), _slice, BLOCKS),
    aten.slice_backward.default: Windowed(
        lambda along: [(_slice_backward_window(along), along.emit.program.type(along.node))], _slice_backward, BLOCKS
    ),
    aten.slice_scatter.default: Windowed(_slice_scatter_reach, _slice_scatter, BLOCKS),
    aten.split.Tensor: Windowed(_split_reach, _split, BLOCKS),
    aten.split_with_sizes.default: Windowed(_split_reach, _split, BLOCKS),
    aten.cat.default: Windowed(_cat_reach, _cat, BLOCKS),
    aten.constant_pad_nd.default: Windowed(_reach(_pad_window("pad")), _constant_pad),
    aten.roll.default: Windowed(_roll_reach, _roll),
    aten.flip.default: Windowed(_reach(_flip_window), _flip),
    aten.unfold.default: Windowed(_reach(_unfold_window), _unfold),
    aten.unfold_backward.default: Windowed(
        lambda along: [(_unfold_backward_window(along), along.emit.program.type(along.node))], _unfold_backward
    ),
    **_pads(1), **_pads(2), **_pads(3),
}  # fmt: skip


def _scan_reach(along: Along) -> Sequence[tuple[Windows, TensorType]]:
    """Its own chunk alone; nothing where that is one element, whose sum is itself."""
    x: fx.Node = along.given["self"]
    size = along.size(x)
    return [(Windows(along.count, size, size, 0), along.emit.type(x))] if size > along.count else []


def _cumsum(along: Along) -> fx.Node:
    x: fx.Node = along.given["self"]
    dtype, size, dim = along.emit.type(along.node).dtype, along.size(x), along.dim
    apart = along.apart(x, Windows(along.count, size, size, 0))
    within = along.emit(aten.cumsum.default, apart, dim + 1, dtype=dtype)
    totals = along.emit(aten.sum.dim_IntList, apart, [dim + 1], dtype=dtype)
    before = along.emit(aten.unsqueeze.default, _before(along, totals, dtype), dim + 1)
    return along.beside(along.emit(aten.add.Tensor, within, before), size)


def _before(along: Along, totals: fx.Node, dtype: torch.dtype) -> fx.Node:
    """For each chunk the sum of the totals of those before it: of a matrix whose rows are chunks, and columns too."""
    emit, dim, count = along.emit, along.dim, along.count
    rest = [1] * (len(emit.shape(totals)) - dim - 1)
    row, column = (emit(aten.reshape.default, emit(aten.arange.default, count), [*shape, *rest])
                   for shape in ([count, 1], [1, count]))  # fmt: skip
    zero = emit(aten.scalar_tensor.default, 0, dtype=dtype)
    matrix = emit(aten.where.self, emit(aten.gt.Tensor, row, column), emit(aten.unsqueeze.default, totals, dim), zero)
    return emit(aten.sum.dim_IntList, matrix, [dim + 1], dtype=dtype)


SCANS = {aten.cumsum.default: Windowed(_scan_reach, _cumsum)}
