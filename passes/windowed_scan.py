"""A running sum along a cut dim, taken apart: the running sum of each chunk, and the sums of the chunks before it.

::

    y: f32[16@dp, 8] = cumsum(x, 0)
        ->
    a: f32[4@dp, 4, 8] = x in chunks;  s: f32[4@dp, 4, 8] = cumsum(a, 1);  t: f32[4@dp, 8] = sum(a, 1)
    b: f32[4@dp, 8] = for each chunk the sum of t over those before it      # as many numbers as there are ranks move
    y: f32[16@dp, 8] = s + b, its chunks behind one another
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardc.sharding import TensorType
from shardc.window import Windows

from .along import Along, Windowed

aten = torch.ops.aten


def _reach(along: Along) -> Sequence[tuple[Windows, TensorType]]:
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


SCANS = {aten.cumsum.default: Windowed(_reach, _cumsum)}
