"""Cut a whole tensor into the pieces that ranks hold, and put pieces together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.sharding import Sharding, ceil_div, num_shards

Region = tuple[tuple[int, int], ...]  # for each sub-dim, where a piece starts and how long it is


def shard(whole: Tensor, sharding: Sharding, position: int) -> Tensor:
    """The piece of a whole tensor that the rank at ``position`` holds; a view where it can be one."""
    if not sharding.cut_axes:
        return whole
    piece = whole.reshape(_refined_shape(sharding, tuple(whole.shape)))
    for dim, (start, length) in enumerate(region(sharding, tuple(whole.shape), position)):
        piece = piece.narrow(dim, start, length)
    return piece.reshape(_piece_shape(sharding, tuple(whole.shape), tuple(piece.shape)))


def unshard(pieces: Sequence[Tensor], sharding: Sharding, shape: tuple[int, ...], name: str = "value") -> Tensor:
    """The whole tensor of ``shape`` from the pieces of all ranks, by position.

    Ranks that hold the same piece must agree bit for bit: an AssertionError names the value and both positions.
    """
    assert not sharding.partial, f"{name}: {sharding} is not whole while a reduction is open"
    whole = pieces[0].new_empty(shape)
    view = whole.view(_refined_shape(sharding, shape))
    owners: dict[Region, int] = {}
    for position, piece in enumerate(pieces):
        where = region(sharding, shape, position)
        owner = owners.setdefault(where, position)
        if owner == position:
            _narrow(view, where).copy_(piece.reshape([length for _, length in where]))
        else:
            assert same_bits(piece, pieces[owner]), (
                f"{name}: replicas of {sharding} at positions {owner} and {position} differ"
            )
    return whole


def global_shape(local_shape: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
    """The shape of the value that an even piece of ``local_shape`` is part of."""
    return tuple(size * num_shards(dim.all_axes) for size, dim in zip(local_shape, sharding.dims, strict=True))


def region(sharding: Sharding, shape: tuple[int, ...], position: int) -> Region:
    """Where the piece of a position lies in the whole tensor, with one dim for every sub-dim."""
    found: list[tuple[int, int]] = []
    for dim, size in zip(sharding.dims, shape, strict=True):
        for sub, axes in dim.subdims(size):
            assert not dim.minor or sub % num_shards(axes) == 0, (sharding, shape)
            chunk = ceil_div(sub, num_shards(axes))
            start = min(chunk * sharding.mesh.index(position, axes), sub)
            found.append((start, min(chunk, sub - start)))
    return tuple(found)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN and signed zeros included."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _narrow(whole: Tensor, where: Region) -> Tensor:
    for dim, (start, length) in enumerate(where):
        whole = whole.narrow(dim, start, length)
    return whole


def _refined_shape(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    return [sub for dim, size in zip(sharding.dims, shape, strict=True) for sub, _ in dim.subdims(size)]


def _piece_shape(sharding: Sharding, shape: tuple[int, ...], refined: tuple[int, ...]) -> list[int]:
    """The sub-dims of a piece joined to the dims of the tensor."""
    sizes, merged = list(refined), []
    for dim in sharding.dims:
        size = 1
        for _ in range(1 + len(dim.minor)):
            size *= sizes.pop(0)
        merged.append(size)
    return merged
