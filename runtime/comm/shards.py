"""Shards of a whole tensor: which part a rank holds, cutting and padding it, and joining the shards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad as constant_pad

from shardc.language.sharding import Sharding, ceil_div, chunk_of, num_shards

Region = tuple[tuple[int, int], ...]  # for each sub-dim, the start and the length of a piece


def shard(whole: Tensor, sharding: Sharding, position: int) -> Tensor:
    """The piece of a whole tensor of the rank at ``position``, without padding; a view where possible."""
    if not sharding.cut_axes:
        return whole
    refined = whole.reshape(_refined_shape(sharding, whole.shape))
    piece = _narrow(refined, region(sharding, whole.shape, position))
    return piece.reshape(_piece_shape(sharding, tuple(piece.shape)))


def pad(piece: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """The piece of a value of global ``shape``, padded with zeros to the size that all ranks have."""
    if tuple(piece.shape) == sharding.local_shape(tuple(shape)):
        return piece
    lengths = [length for _, length in region(sharding, shape, position)]
    fills = [chunk - length for chunk, length in zip(_chunks(sharding, shape), lengths, strict=True)]
    padded = constant_pad(piece.reshape(lengths), [n for fill in reversed(fills) for n in (0, fill)])
    return padded.reshape(sharding.local_shape(tuple(shape)))


def unpad(padded: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """A piece without its padding; a view where possible."""
    lengths = [length for _, length in region(sharding, shape, position)]
    chunks = _chunks(sharding, shape)
    if lengths == chunks:
        return padded
    piece = _narrow(padded.reshape(chunks), [(0, length) for length in lengths])
    return piece.reshape(_piece_shape(sharding, lengths))


def unshard(pieces: Sequence[Tensor], sharding: Sharding, shape: tuple[int, ...], name: str = "value") -> Tensor:
    """The whole tensor of ``shape`` from the padded pieces of all ranks, by position.

    Replicas of a piece must agree bit for bit, except for padding: else an AssertionError names the value and two
    positions that differ.
    """
    assert not sharding.partial, f"{name}: {sharding} is not whole while a reduction is open"
    whole = pieces[0].new_empty(shape)
    view = whole.view(_refined_shape(sharding, shape))
    owners: dict[Region, int] = {}
    for position, piece in enumerate(pieces):
        where = region(sharding, shape, position)
        owner = owners.setdefault(where, position)
        piece = unpad(piece, sharding, shape, position)
        if owner == position:
            _narrow(view, where).copy_(piece.reshape([length for _, length in where]))
        else:
            is_same = same_bits(piece, unpad(pieces[owner], sharding, shape, owner))
            assert is_same, f"{name}: replicas of {sharding} at positions {owner} and {position} differ"
    return whole


def region(sharding: Sharding, shape: Sequence[int], position: int) -> Region:
    """The part of the whole tensor that a position holds, with one dim for every sub-dim."""
    return tuple(
        chunk_of(sub, axes, sharding.mesh, position)
        for dim, size in zip(sharding.dims, shape, strict=True)
        for sub, axes in dim.subdims(size)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN and signed zeros included."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    own = [x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for x in (a, b)]
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in own))


def _narrow(whole: Tensor, where: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(where):
        whole = whole.narrow(dim, start, length)
    return whole


def _refined_shape(sharding: Sharding, shape: Sequence[int]) -> list[int]:
    return [sub for dim, size in zip(sharding.dims, shape, strict=True) for sub, _ in dim.subdims(size)]


def _chunks(sharding: Sharding, shape: Sequence[int]) -> list[int]:
    """The size of every sub-dim on a rank, including padding."""
    subdims = [sub for dim, size in zip(sharding.dims, shape, strict=True) for sub in dim.subdims(size)]
    return [ceil_div(size, num_shards(axes)) for size, axes in subdims]


def _piece_shape(sharding: Sharding, refined: Sequence[int]) -> list[int]:
    """The shape of a piece, from the sizes of its sub-dims."""
    sizes = iter(refined)
    return [math.prod(next(sizes) for _ in range(1 + len(dim.minor))) for dim in sharding.dims]
