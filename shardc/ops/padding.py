"""Padding: what a rank holds beyond the data of its chunk where a dim is cut unevenly."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def fit(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with ``dim`` of another size, cut short or longer by zeros, as a collective of equal pieces needs it."""
    here = x.shape[dim]
    if size < here:
        return x.narrow(dim, 0, size).contiguous()
    after = [0] * (2 * (x.ndim - dim - 1)) + [0, size - here]
    return pad(x, after) if size > here else x


def fill_padding(x: Tensor, dim: int, inner: int, chunk: int, length: int, fill: float) -> Tensor:
    """``x`` with ``fill`` for its padding.

    ``dim`` is rows of ``chunk * inner`` elements, of which the first ``length * inner`` are data.
    """
    if length == chunk:
        return x
    rows = x.unflatten(dim, (-1, chunk * inner))
    data = rows.narrow(dim + 1, 0, length * inner)
    padding = list(data.shape)
    padding[dim + 1] = (chunk - length) * inner
    return torch.cat([data, data.new_full(padding, fill)], dim + 1).view(x.shape)


def neutral(reduce: str, dtype: torch.dtype) -> float:
    """What does not change a sum, a maximum or a minimum."""
    if reduce == "sum":
        return 0
    if dtype == torch.bool:
        return int(reduce == "min")
    if dtype.is_floating_point:
        return -math.inf if reduce == "max" else math.inf
    return torch.iinfo(dtype).min if reduce == "max" else torch.iinfo(dtype).max
