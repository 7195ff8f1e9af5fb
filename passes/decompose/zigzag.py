"""Zigzag and back along a cut dim: each rank sends its positions to the two ranks that have them in the other order."""

from __future__ import annotations

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.language.windows import Windows
from shardc.ops.zigzag import in_order, zigzag
from shardc.program.node import operand

from .along import Along, Windowed

aten = torch.ops.aten


def _stretches(along: Along) -> tuple[Windows, Windows] | None:
    """The early and the late stretches as windows of the positions in order; None if the dim is not cut so evenly."""
    _, dim, _, _, count, _ = along.node.args
    size = along.size(along.node)
    if (dim, count) != (along.dim, along.count) or size % (2 * along.count):
        return None
    half = size // 2
    return Windows(along.count, size, half, half - 1, -1), Windows(along.count, size, half, half)


def _reach(along: Along) -> list[tuple[Windows, TensorType]]:
    stretches, type_ = _stretches(along), along.emit.type(along.node)
    return [(each, type_) for each in stretches or ()]


def _zigzag(along: Along) -> fx.Node:
    chunks = [along.apart(operand(along.node), each) for each in _stretches(along) or ()]
    joined = along.emit(aten.cat.default, chunks, along.dim + 1)
    return along.beside(joined, along.chunks_of(along.size(along.node)))


def _in_order(along: Along) -> fx.Node:
    stretches, size = _stretches(along), along.size(along.node)
    chunks = along.apart(operand(along.node), along.chunks_of(size))
    parts, start = [], 0
    for each in stretches or ():
        piece = along.emit(aten.slice.Tensor, chunks, along.dim + 1, start, start + each.size)
        parts.append(along.beside(piece, each))
        start += each.size
    return along.emit(aten.add.Tensor, *parts)


ZIGZAGS = {zigzag: Windowed(_reach, _zigzag), in_order: Windowed(_reach, _in_order)}
