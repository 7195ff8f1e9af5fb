"""Shards: the piece of a tensor on each rank, and the DTensor placements of a sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import pad as constant_pad

from shardc.language.cut import join_dim
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.sharding import WHOLE, DimSharding, Sharding, ceil_div, chunk_of, num_shards


@dataclass(frozen=True, slots=True)
class Digit:
    """A factor of a dim's size: the size of a mesh axis that cuts the dim, or of an uncut run (``axis`` is empty)."""

    size: int
    axis: str = ""


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, not a copy."""
    assert isinstance(tensor, DTensor), type(tensor)
    piece: Tensor = tensor._local_tensor  # to_local is an autograd op, which costs more than a small op
    return piece


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank stores, not a copy; all of a plain tensor."""
    return local(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def placements(sharding: Sharding, shape: Sequence[int], name: str = "value") -> tuple[Placement, ...]:
    """The DTensor placements of a sharding, one for each axis of the mesh.

    An axis that is minor to a later axis of the mesh, or to an uncut run of elements as in ``blocks``, cuts each of
    several stretches and becomes a strided shard. Raises a ShardingError for parts of an axis, which no placement
    expresses, and for shardings that torch would gather in a wrong order.
    """
    assert not sharding.partial, (name, sharding)
    placed: dict[str, Placement] = {}
    for dim, (cut, size) in enumerate(zip(sharding.dims, shape, strict=True)):
        row = _digits(cut, size, sharding, name)
        _check_gatherable(row, sharding, f"{name}, dim {dim}")
        for axis in sharding.mesh.axis_names:
            at = next((i for i, digit in enumerate(row) if digit.axis == axis), None)
            if at is None:
                continue
            stretches = math.prod(digit.size for digit in row[:at])
            placed[axis] = Shard(dim) if stretches == 1 else _StridedShard(dim, split_factor=stretches)
            row[at] = Digit(1)
    return tuple(placed.get(axis, Replicate()) for axis in sharding.mesh.axis_names)


def check_order(mesh: Mesh) -> None:
    """Raise a ShardingError if ranks do not ascend along an axis of the mesh, since torch's groups sort their ranks."""
    for name in mesh.axis_names:
        for group in mesh.groups((mesh.axis(name),)):
            ranks = [mesh.rank(position) for position in group]
            if ranks != sorted(ranks):
                what, problem = f"{mesh}, ranks {ranks} along axis {name!r}", "torch gathers in the order of ranks"
                raise ShardingError("mesh", what, problem, "order the mesh so that ranks ascend along every axis")


def sharding_of(placed: Sequence[Placement], shape: Sequence[int], mesh: Mesh, name: str = "value") -> Sharding:
    """The sharding of placements. Raises a ShardingError for a partial value or an unsupported uneven cut."""
    if all(type(placement) in (Shard, Replicate) for placement in placed):
        axes = [(mesh.axis(axis), placement) for axis, placement in zip(mesh.axis_names, placed, strict=True)]
        cuts = [tuple(part for part, placement in axes if placement.is_shard(dim)) for dim in range(len(shape))]
        plain = Sharding(mesh, tuple(map(DimSharding, cuts)))
        if plain.storable(tuple(shape)) == plain:
            return plain
    rows = [[Digit(size)] for size in shape]
    for axis, placement in zip(mesh.axis_names, placed, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            what, problem = f"placements {tuple(placed)}", f"{placement} on axis {axis!r} is neither cut nor whole"
            raise ShardingError(name, what, problem, "redistribute it to Replicate or Shard first")
        stretches, new = getattr(placement, "split_factor", 1), Digit(mesh.axis_size(axis), axis)
        rows[placement.dim] = _cut(rows[placement.dim], stretches, new, f"{name}, dim {placement.dim}")
    digits = [[digit for digit in row if digit.size > 1 or digit.axis] for row in rows]
    cut_by = {"": WHOLE} | {axis: DimSharding((mesh.axis(axis),)) for axis in mesh.axis_names}
    subdims = [[(digit.size, cut_by[digit.axis]) for digit in row] for row in digits]
    return Sharding(mesh, tuple(map(join_dim, subdims)))


def _digits(cut: DimSharding, size: int, sharding: Sharding, name: str) -> list[Digit]:
    row: list[Digit] = []
    for sub, axes in cut.subdims(size):
        for part in axes:
            if not sharding.mesh.is_whole(part):
                raise ShardingError(
                    name, f"{sharding}, cut by the part {sharding.mesh.print_part(part)} of axis {part.name!r}",
                    "a DTensor is cut by whole axes of the mesh only",
                    f"split {part.name!r} into two axes of the mesh, or leave this value whole over it",
                )  # fmt: skip
            row.append(Digit(part.size, part.name))
        row.append(Digit(ceil_div(sub, num_shards(axes))))
    return row


def _check_gatherable(row: list[Digit], sharding: Sharding, who: str) -> None:
    """Raise a ShardingError unless torch 2.13 gathers the dim correctly.

    It does for fewer than two cuts, for no uncut run before a cut, and for two cuts of which only the last is strided.
    """
    axes = [digit.axis for digit in row if digit.axis]
    is_dense = all(digit.axis or digit.size == 1 for digit in row[: len(axes)])
    is_last_strided = [name for name in sharding.mesh.axis_names if name in axes] == axes and bool(row[0].axis)
    if len(axes) < 2 or is_dense or (is_last_strided and len(axes) == 2):
        return
    what, problem = f"{sharding}, blocks cut by {' and '.join(axes)}", "torch does not gather such a DTensor rightly"
    raise ShardingError(who, what, problem, "cut the blocks by one axis, and another dim by the other")


def _cut(row: list[Digit], stretches: int, new: Digit, who: str) -> list[Digit]:
    """The row after a new cut: the digit ``new`` cuts the first uncut run that follows ``stretches`` uncut elements."""
    done, rest = list[Digit](), list(row)
    while stretches > 1:
        digit = rest.pop(0)
        if not digit.axis:
            factor = math.gcd(digit.size, stretches)
            stretches //= factor
            rest[:0] = [Digit(digit.size // factor)] * (digit.size > factor)
            digit = Digit(factor)
        done.append(digit)
    at = next((i for i, digit in enumerate(rest) if not digit.axis and digit.size > 1), None)
    if at is None or rest[at].size % new.size:
        what = f"{1 if at is None else rest[at].size} elements left to cut by {new.axis}={new.size}"
        raise ShardingError(who, what, "the cut is uneven", f"choose sizes that divide by {new.size}")
    remaining = [Digit(rest[at].size // new.size)] * (rest[at].size > new.size)
    return [*done, *rest[:at], new, *remaining, *rest[at + 1 :]]


Region = tuple[tuple[int, int], ...]  # for each sub-dim the start and the length of a piece


def shard(whole: Tensor, sharding: Sharding, position: int) -> Tensor:
    """The piece of a whole tensor at ``position``, without padding; a view if possible."""
    if not any(part.size > 1 for part in sharding.cut_axes):
        return whole
    refined = whole.reshape(_refined_shape(sharding, whole.shape))
    piece = _narrow(refined, region(sharding, whole.shape, position))
    return piece.reshape(_piece_shape(sharding, tuple(piece.shape)))


def pad(piece: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """The piece of a value of global ``shape``, padded with zeros to the size that is equal on all ranks."""
    if tuple(piece.shape) == sharding.local_shape(tuple(shape)):
        return piece
    lengths = [length for _, length in region(sharding, shape, position)]
    fills = [chunk - length for chunk, length in zip(_chunks(sharding, shape), lengths, strict=True)]
    padded = constant_pad(piece.reshape(lengths), [n for fill in reversed(fills) for n in (0, fill)])
    return padded.reshape(sharding.local_shape(tuple(shape)))


def unpad(padded: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """A piece without its padding; a view if possible."""
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
    """The part of the whole tensor that a position holds, with an entry for every sub-dim."""
    return tuple(
        chunk_of(sub, axes, sharding.mesh, position)
        for dim, size in zip(sharding.dims, shape, strict=True)
        for sub, axes in dim.subdims(size)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN and signed zeros included. False for two different meta tensors."""
    if a is b:
        return True
    if a.is_meta or a.shape != b.shape or a.dtype != b.dtype:
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
