"""Running sums along a cut dim: a rank scans its own chunk, and adds the totals of chunks before or behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import fx

from shardc.language.windows import Windows
from shardc.ops.reduction import logsumexp_from_end, sum_from_end

from .along import Along, Windowed, windowed

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan along a dim, such as ``cumsum``.

    ``total``: the op that reduces a chunk. ``joined``: the op that combines two totals. ``nothing``: the total of no
    elements. ``is_beyond``: compares the indices of two chunks; true if the second counts for the first.
    """

    total: Any
    joined: Any
    nothing: float
    is_beyond: Any

    def expand(self, along: Along, window: Windows) -> fx.Node:
        """The scan within each chunk, joined with the totals of the chunks that count for it."""
        emit, dim, dtype = along.emit, along.dim, along.emit.type(along.node).dtype
        wide = {"dtype": dtype} if self.total is aten.sum.dim_IntList else {}
        chunks = along.apart(along.given["self"], window, self.nothing)
        within = emit(along.node.target, chunks, dim + 1, **(wide if "dtype" in along.given else {}))
        totals = emit(self.total, chunks, [dim + 1], **wide)
        # a matrix of chunks by chunks: each column holds the total of its chunk in the rows that it counts for
        rest = [1] * (len(emit.shape(totals)) - dim - 1)
        row, column = (
            emit(aten.reshape.default, emit(aten.arange.default, along.count), [*shape, *rest])
            for shape in ([along.count, 1], [1, along.count])
        )
        nothing = emit(aten.scalar_tensor.default, self.nothing, dtype=dtype)
        counted = emit(self.is_beyond, row, column)
        matrix = emit(aten.where.self, counted, emit(aten.unsqueeze.default, totals, dim), nothing)
        others = emit(aten.unsqueeze.default, emit(self.total, matrix, [dim + 1], **wide), dim + 1)
        return along.beside(emit(self.joined, within, others), window)


def _scan_window(along: Along) -> Windows | None:
    """The chunks of the dim; None if each is one element, whose sum is itself."""
    size = along.size(along.given["self"])
    return along.chunks_of(size) if size > along.count else None


SUMS = Scan(aten.sum.dim_IntList, aten.add.Tensor, 0.0, aten.gt.Tensor)
LOGSUMEXPS = Scan(aten.logsumexp.default, aten.logaddexp.default, -inf, aten.gt.Tensor)
OF_SCANS: dict[Any, Scan] = {
    aten.cumsum.default: SUMS,
    sum_from_end: replace(SUMS, is_beyond=aten.lt.Tensor),
    aten.logcumsumexp.default: LOGSUMEXPS,
    logsumexp_from_end: replace(LOGSUMEXPS, is_beyond=aten.lt.Tensor),
}
SCANS: dict[Any, Windowed] = {op: windowed(_scan_window, scan.expand) for op, scan in OF_SCANS.items()}
