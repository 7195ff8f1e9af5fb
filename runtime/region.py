"""A region of a value: for each dim the indices that are wanted, in order; and how regions pass through views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from shardc.sharding import Sharding

from .piece import region as piece_bounds

Region = tuple[Tensor, ...]  # int64, one for each dim


def whole_region(shape: Sequence[int], device: torch.device) -> Region:
    """All of a value."""
    return tuple(torch.arange(size, device=device) for size in shape)


def piece_region(sharding: Sharding, shape: tuple[int, ...], position: int, device: torch.device) -> Region:
    """What the rank at a position holds of a value."""
    bounds = iter(piece_bounds(sharding, shape, position))
    found: list[Tensor] = []
    for dim, size in zip(sharding.dims, shape, strict=True):
        subs = [sub for sub, _ in dim.subdims(size)]
        starts = [next(bounds) for _ in subs]
        found.append(join_index([torch.arange(a, a + n, device=device) for a, n in starts], subs))
    return tuple(found)


def take(value: Tensor, region: Region) -> Tensor:
    """The region of a value, contiguous."""
    for dim, index in enumerate(region):
        if not is_all(index, value.shape[dim]):
            value = value.index_select(dim, index)
    return value.contiguous()


def is_all(index: Tensor, size: int) -> bool:
    """Whether indices that do not repeat are all of a dim, in order."""
    return len(index) == size and bool((index == torch.arange(size, device=index.device)).all())


def broadcast_region(region: Region, shape: Sequence[int]) -> Region:
    """What a region of the result needs of an operand of ``shape``, which is broadcast."""
    last = region[len(region) - len(shape) :]
    pairs = zip(last, shape, strict=True)
    return tuple(index.new_zeros(min(len(index), 1)) if size == 1 else index for index, size in pairs)


def reshape_region(region: Region, shape: Sequence[int], source: Sequence[int]) -> Region | None:
    """What a region of a value of ``shape`` is in the one of shape ``source`` that it is a view of.

    None where it is no region there: rows of a matrix are, as a run of its elements, only when they are whole rows.
    """
    found: list[Tensor] = []
    for (start, stop), sizes in _groups(shape, source):
        joined = join_index(region[start:stop], shape[start:stop]).to(region[0].device if region else "cpu")
        split = split_index(joined, sizes)
        if split is None:
            return None
        found += split
    return tuple(found)


def join_index(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The indices in one dim that is made of several, of all combinations, the last fastest."""
    if not indices:
        return torch.zeros(1, dtype=torch.int64)
    pairs = list(zip(indices, sizes, strict=True))
    return reduce(lambda joined, pair: (joined[:, None] * pair[1] + pair[0]).flatten(), pairs[1:], indices[0])


def split_index(index: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
    """The indices in several dims whose combinations these are; None where there are none such."""
    if not sizes:
        return []
    if len(sizes) == 1:
        return [index]
    if not len(index):
        return None
    inner = math.prod(sizes[1:])
    first = torch.unique_consecutive(index // inner)
    rest = (index % inner)[: len(index) // len(first)]
    if not torch.equal(join_index([first, rest], [0, inner]), index):
        return None
    others = split_index(rest, sizes[1:])
    return None if others is None else [first, *others]


def _groups(shape: Sequence[int], source: Sequence[int]) -> list[tuple[tuple[int, int], Sequence[int]]]:
    """Runs of dims of ``shape``, each with the dims of ``source`` that it is a view of: as short as they can be."""
    found: list[tuple[tuple[int, int], Sequence[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        start, first = i, j
        left, right = 1, 1
        while (left != right or (i, j) == (start, first)) and (i < len(shape) or j < len(source)):
            if j == len(source) or (i < len(shape) and left <= right):
                left, i = left * shape[i], i + 1
            else:
                right, j = right * source[j], j + 1
        found.append(((start, i), source[first:j]))
    return found
