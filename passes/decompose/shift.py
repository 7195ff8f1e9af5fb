"""Ops that move elements along a cut dim, taken apart into windows: slices, padding, rolls, flips, concatenations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType, ceil_div
from shardc.language.size import slice_bounds
from shardc.language.windows import AROUND, EDGE, FILLED, MIRRORED, Windows

from .along import Along, Windowed, windowed

aten = torch.ops.aten


BLOCKS = "blk"


# Slices.


def _slice_window(along: Along) -> Windows:
    given = along.given
    size = given["input_sizes"][along.dim] if "input_sizes" in given else along.size(given["self"])
    start, end, step = slice_bounds(given["start"], given["end"], given["step"], size)
    return Windows(along.count, size, max(0, ceil_div(end - start, step)), start, step)


def _slice(along: Along, window: Windows) -> fx.Node:
    chunks = along.apart(along.given["self"], window)
    if window.stride > 1:
        chunks = along.emit(aten.slice.Tensor, chunks, along.dim + 1, 0, window.size, window.stride)
    return along.beside(chunks, along.chunks_of(window.total))


def _slice_backward(along: Along, window: Windows) -> fx.Node:
    chunks = along.apart(along.given["grad_output"], along.chunks_of(window.total))
    if window.stride > 1:
        shape = list(along.emit.shape(chunks))
        shape[along.dim + 1] = window.size
        chunks = along.emit(aten.slice_backward.default, chunks, shape, along.dim + 1, 0, window.size, window.stride)
    return along.beside(chunks, window)


def _slice_scatter_window(along: Along) -> Windows | None:
    given, size = along.given, along.size(along.given["self"])
    start, end, step = slice_bounds(given["start"], given["end"], given["step"], size)
    return Windows(along.count, end - start, size, -start) if step == 1 else None


def _slice_scatter(along: Along, window: Windows) -> fx.Node:
    """The source, padded to the whole size, within its range; the old value elsewhere."""
    emit, start, end = along.emit, -window.start, window.length - window.start
    padded = along.padded(along.given["src"], start, window.total - end)
    position = _positions(along, window.total)
    inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, position, start), emit(aten.lt.Scalar, position, end))
    return emit(aten.where.self, inside, padded, along.given["self"])


def _positions(along: Along, size: int) -> fx.Node:
    """The index of each element of the dim, in a shape that broadcasts."""
    shape = [-1, *[1] * (along.ndim - 1 - along.dim)]
    return along.emit(aten.reshape.default, along.emit(aten.arange.default, size), shape)


# Splits and concatenations.


def _ranges(along: Along, pieces: Iterable[TensorType | None]) -> list[tuple[int, int]]:
    """Start and end of each piece of the dim."""
    return list(pairwise(accumulate((piece.shape[along.dim] for piece in pieces if piece is not None), initial=0)))


def _split_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    x, ranges = along.given["self"], _ranges(along, along.emit.program.types(along.node))
    return [(Windows(along.count, along.size(x), end - start, start), along.emit.type(x)) for start, end in ranges]


def _split(along: Along) -> list[fx.Node | None]:
    """The pieces as slices, each of which is taken apart on its own."""
    x, ranges = along.given["self"], _ranges(along, along.emit.program.types(along.node))
    return [along.emit(aten.slice.Tensor, x, along.dim, start, end) for start, end in ranges]


def _cat_reach(along: Along) -> list[tuple[Windows, TensorType]]:
    types, total = [along.emit.type(piece) for piece in along.given["tensors"]], along.size(along.node)
    pairs = zip(types, _ranges(along, types), strict=True)
    return [(Windows(along.count, end - start, total, -start), type_) for type_, (start, end) in pairs]


def _cat(along: Along) -> fx.Node:
    """Each piece is padded to the whole size, and each element is taken from its own piece."""
    pieces, total = along.given["tensors"], along.size(along.node)
    position = _positions(along, total)
    result: fx.Node | None = None
    for piece, (start, end) in zip(pieces, _ranges(along, map(along.emit.type, pieces)), strict=True):
        padded = along.padded(piece, start, total - end)
        before = along.emit(aten.lt.Scalar, position, start)
        result = padded if result is None else along.emit(aten.where.self, before, result, padded)
    assert result is not None
    return result


# Padding with a number, the edge or a mirror image. An op lists both ends of each of the last dims, the last dim first.


def _pad_window(along: Along, beyond: int = FILLED) -> Windows:
    given, at = along.given, 2 * (along.ndim - 1 - along.dim)
    before, after = given["pad" if "pad" in given else "padding"][at : at + 2] or (0, 0)
    size = along.size(given["self"])
    return Windows(along.count, size, before + size + after, -before, beyond=beyond)


def _other_padding(along: Along) -> list[int]:
    """The op's padding without that of this dim."""
    given, at = along.given, 2 * (along.ndim - 1 - along.dim)
    return [0 if i in (at, at + 1) else pad for i, pad in enumerate(given["pad" if "pad" in given else "padding"])]


def _pad(along: Along, window: Windows) -> fx.Node:
    x, _, *value = along.given.values()
    padded = along.beside(along.apart(x, window, *value), along.chunks_of(window.total))
    others = _other_padding(along)
    return along.emit(along.node.target, padded, others, *value) if any(others) else padded


def _pad_backward(along: Along, window: Windows) -> fx.Node:
    others = _other_padding(along)
    gradient = along.beside(along.apart(along.given["grad_output"], along.chunks_of(window.total)), window)
    return along.emit(along.node.target, gradient, along.given["self"], others) if any(others) else gradient


# Rolls and flips.


def _roll_window(along: Along) -> Windows | None:
    given, size = along.given, along.size(along.given["self"])
    shift = sum(by for dim, by in zip(given["dims"], given["shifts"], strict=True) if dim % along.ndim == along.dim)
    return Windows(along.count, size, size, -shift % max(1, size), beyond=AROUND) if given["dims"] else None


def _roll(along: Along, window: Windows) -> fx.Node:
    given = along.given
    rolled = along.beside(along.apart(given["self"], window), along.chunks_of(window.total))
    pairs = zip(given["shifts"], given["dims"], strict=True)
    others = [(by, dim) for by, dim in pairs if dim % along.ndim != along.dim]
    return along.emit(aten.roll.default, rolled, *map(list, zip(*others, strict=True))) if others else rolled


def _flip_window(along: Along) -> Windows:
    size = along.size(along.given["self"])
    return Windows(along.count, size, size, size - 1, -1)


def _flip(along: Along, window: Windows) -> fx.Node:
    """Chunks change places, and each is flipped."""
    chunks = along.emit(aten.flip.default, along.apart(along.given["self"], window), [along.dim + 1])
    flipped = along.beside(chunks, along.chunks_of(window.total))
    others = [dim for dim in along.given["dims"] if dim % along.ndim != along.dim]
    return along.emit(aten.flip.default, flipped, others) if others else flipped


# Sliding windows as a dim of their own.


def _unfold_window(along: Along) -> Windows:
    given, is_backward = along.given, "grad_in" in along.given
    length = given["input_sizes"][along.dim] if is_backward else along.size(given["self"])
    total = along.size(given["grad_in"] if is_backward else along.node)
    return Windows(along.count, length, total, 0, given["step"], given["size"])


def _unfold(along: Along, window: Windows) -> fx.Node:
    chunks = along.apart(along.given["self"], window)
    unfolded = along.emit(aten.unfold.default, chunks, along.dim + 1, window.span, window.stride)
    return along.beside(unfolded, along.chunks_of(window.total))


def _unfold_backward(along: Along, window: Windows) -> fx.Node:
    chunks = along.apart(along.given["grad_in"], along.chunks_of(window.total))
    shape = list(along.emit.shape(chunks))[:-1]
    shape[along.dim + 1] = window.size
    back = along.emit(aten.unfold_backward.default, chunks, shape, along.dim + 1, window.span, window.stride)
    return along.beside(back, window)


def _pads() -> dict[Any, Windowed]:
    """Padding of the last dims by the input's own values, and back."""
    return {
        getattr(aten, f"{name}{ndim}d{suffix}").default: windowed(partial(_pad_window, beyond=beyond), expand)
        for name, beyond in (("reflection_pad", MIRRORED), ("replication_pad", EDGE))
        for ndim in (1, 2, 3)
        for suffix, expand in (("", _pad), ("_backward", _pad_backward))
    }


SHIFTS: dict[Any, Windowed] = {
    aten.slice.Tensor: windowed(_slice_window, _slice, BLOCKS),
    aten.slice_backward.default: windowed(_slice_window, _slice_backward, BLOCKS),
    aten.slice_scatter.default: windowed(_slice_scatter_window, _slice_scatter, BLOCKS, tensor="src"),
    aten.split.Tensor: Windowed(_split_reach, _split, BLOCKS),
    aten.split_with_sizes.default: Windowed(_split_reach, _split, BLOCKS),
    aten.cat.default: Windowed(_cat_reach, _cat, BLOCKS),
    aten.constant_pad_nd.default: windowed(_pad_window, _pad),
    aten.roll.default: windowed(_roll_window, _roll),
    aten.flip.default: windowed(_flip_window, _flip),
    aten.unfold.default: windowed(_unfold_window, _unfold),
    aten.unfold_backward.default: windowed(_unfold_window, _unfold_backward),
    **_pads(),
}
