"""XLA's gather and scatter as indexing in torch, parsed from the text of their dims."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """The dims of the operand ``x`` that index vectors name, and the dims of the result that pieces fill.

    ``named``: the dim of ``x`` for each component of an index vector. ``gone``: dims of ``x`` that a piece does not
    have, since it has one element there. ``batch``: dims of ``x`` that are paired with dims ``index_batch`` of the
    indices. ``offset``: the dims of the result that the dims of a piece become. ``vector``: the dim of the indices
    along which index vectors lie. ``sizes``: the size of a piece in each dim of ``x``.
    """

    named: list[int]
    gone: list[int]
    batch: list[int]
    index_batch: list[int]
    offset: list[int]
    vector: int
    sizes: list[int]

    @staticmethod
    def parse(text: str, x: Tensor, updates: Tensor | None = None) -> Dims:
        """Parse the text of a gather, or with ``updates`` that of a scatter."""

        def listed(*names: str) -> list[int]:
            found = next((re.search(rf"\b{name}={{(.*?)}}", text) for name in names if f"{name}={{" in text), None)
            return [int(n) for n in found[1].split(",") if n] if found else []

        offset = listed("offset_dims", "update_window_dims")
        gone = listed("collapsed_slice_dims", "inserted_window_dims")
        batch = listed("operand_batching_dims")
        sizes = listed("slice_sizes")
        if updates is not None:
            window = iter(offset)
            sizes = [1 if d in gone + batch else updates.shape[next(window)] for d in range(x.ndim)]
        assert len(sizes) == x.ndim, text
        vector = re.search(r"index_vector_dim=(\d+)", text)
        assert vector
        named = listed("start_index_map", "scatter_dims_to_operand_dims")
        return Dims(
            named, gone, batch, listed("start_indices_batching_dims"),
            offset, int(vector[1]), sizes,
        )  # fmt: skip

    def taken(self, x: Tensor) -> list[int]:
        """The dims of ``x`` in which a piece is smaller than ``x``, in the order of the index vector."""
        return [dim for dim in self.named if self.sizes[dim] < x.shape[dim]]

    def kept(self, x: Tensor) -> list[int]:
        """The dims of ``x`` in which a piece is as large as ``x``, without batching dims."""
        return [dim for dim in range(x.ndim) if dim not in self.taken(x) + self.batch]

    def windows(self, x: Tensor) -> list[int]:
        """The taken dims that a piece still has."""
        return [dim for dim in self.taken(x) if dim not in self.gone]

    def places(self, starts: Tensor, x: Tensor) -> list[Tensor]:
        """The positions of elements in each taken dim, over the dims of the indices and then of the windows."""
        columns = starts.unbind(self.vector) if self.vector < starts.ndim else [starts]
        windows = self.windows(x)
        found = [at.reshape([*at.shape, *[1] * len(windows)]) for at in columns]
        named = {dim: at for dim, at in zip(self.named, found, strict=True) if dim in self.taken(x)}
        for i, dim in enumerate(windows):
            if self.sizes[dim] > 1:
                named[dim] = named[dim] + _along(torch.arange(self.sizes[dim]), i, len(windows))
        return list(named.values())


def _along(values: Tensor, dim: int, ndim: int) -> Tensor:
    return values.reshape([-1 if i == dim else 1 for i in range(ndim)])


def gather(text: str, x: Tensor, starts: Tensor) -> Tensor:
    """``x[starts]``; with batching dims, a ``torch.gather`` along all taken dims merged."""
    dims = Dims.parse(text, x)
    places = dims.places(starts, x)
    if not dims.batch:
        found = _permuted(x, dims.taken(x) + dims.kept(x))[tuple(places)]
        return found.movedim(*_window_order(dims, x, found))
    lead, flat, index = _in_batches(dims, x, places)
    found = flat.gather(lead, index)
    found = found.reshape([*_broadcast_shape(places), *flat.shape[lead + 1 :]])
    return found.movedim(*_window_order(dims, x, found))


def scatter(text: str, x: Tensor, starts: Tensor, updates: Tensor, reduce: str) -> Tensor:
    """``x`` with ``updates`` added at ``starts``, or with the minimum of both (``amin``)."""
    dims = Dims.parse(text, x, updates)
    places = dims.places(starts, x)
    order = dims.taken(x) + dims.kept(x)
    updates = updates.movedim(*reversed(_window_order(dims, x, updates)))
    if not dims.batch and reduce == "sum":
        return _unpermuted(_permuted(x, order).index_put(tuple(places), updates, accumulate=True), order)
    lead, flat, index = _in_batches(dims, x, places)
    values = updates.reshape(index.shape)
    added = (
        flat.scatter_add(lead, index, values) if reduce == "sum" else flat.scatter_reduce(lead, index, values, reduce)
    )
    order = _batch_order(dims) + order
    return _unpermuted(added.reshape([x.shape[dim] for dim in order]), order)


def _window_order(dims: Dims, x: Tensor, result: Tensor) -> tuple[list[int], list[int]]:
    """The positions of a piece's dims behind the dims of the indices, and their positions in the result."""
    last = dims.windows(x) + dims.kept(x)
    stay = [dim for dim in last if dim not in dims.gone]
    count = result.ndim - len(stay)
    return [count + stay.index(dim) for dim in sorted(stay)], dims.offset


def _batch_order(dims: Dims) -> list[int]:
    """The batching dims of ``x`` in the order of those of the indices, which must come first."""
    assert sorted(dims.index_batch) == list(range(len(dims.batch))), dims
    return [dims.batch[dims.index_batch.index(dim)] for dim in range(len(dims.batch))]


def _in_batches(dims: Dims, x: Tensor, places: list[Tensor]) -> tuple[int, Tensor, Tensor]:
    """The dim that merges all taken dims, ``x`` as ``[*batch, merged, *kept]``, and an index tensor along this dim."""
    batch, taken, kept = _batch_order(dims), dims.taken(x), dims.kept(x)
    sizes = [[x.shape[dim] for dim in group] for group in (batch, taken, kept)]
    flat = _permuted(x, batch + taken + kept).reshape([*sizes[0], math.prod(sizes[1]), *sizes[2]])
    index = sum(at.long() * math.prod(sizes[1][i + 1 :]) for i, at in enumerate(places))
    assert isinstance(index, Tensor)
    index = index.reshape([*sizes[0], -1, *[1] * len(kept)])
    return len(batch), flat, index.expand([*index.shape[: len(batch) + 1], *sizes[2]])


def _broadcast_shape(places: list[Tensor]) -> torch.Size:
    return torch.broadcast_shapes(*(at.shape for at in places))


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    return x if order == sorted(order) else x.permute(order)


def _unpermuted(x: Tensor, order: list[int]) -> Tensor:
    return x if order == sorted(order) else x.permute([order.index(dim) for dim in range(x.ndim)])
