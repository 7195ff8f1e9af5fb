"""Between our shardings and DTensor's placements: the border to torch's own distributed tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import pad as constant_pad

from shardc.language.cut import join_dim
from shardc.language.errors import ShardingError
from shardc.language.mesh import AxisPart, Mesh
from shardc.language.sharding import WHOLE, DimSharding, Sharding, ceil_div, chunk_of, num_shards


@dataclass(frozen=True, slots=True)
class Digit:
    """A dim is a row of digits, major first: one for each axis that cuts it, and one for each run that is whole."""

    size: int
    axis: str = ""


def to_dtensor(
    piece: Tensor, sharding: Sharding, shape: tuple[int, ...], device_mesh: DeviceMesh, name: str = "value"
) -> DTensor:
    """The piece of one rank as a DTensor on the whole mesh; nothing is sent or checked."""
    return DTensorMaker(sharding, shape, device_mesh, name)(piece)


class DTensorMaker:
    """Makes DTensors of one sharding and shape; the first is a step of autograd, further ones look nothing up."""

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], device_mesh: DeviceMesh, name: str) -> None:
        self.device_mesh, self.shape = device_mesh, torch.Size(shape)
        self.stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self.placements = placements(sharding, shape, name)
        self._specs: dict[torch.dtype, Any] = {}

    def __call__(self, piece: Tensor) -> DTensor:
        """The DTensor whose piece on this rank is given."""
        spec = self._specs.get(piece.dtype)
        if spec is not None:
            return new_dtensor(piece, spec)
        made = DTensor.from_local(
            piece, self.device_mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        spec = self._specs[piece.dtype] = getattr(made, "_spec", None)
        return made if local(made).device == piece.device else new_dtensor(piece, spec)  # in host memory, it stays


def new_dtensor(piece: Tensor, spec: Any) -> DTensor:
    """A DTensor, without its ``__init__``: that does nothing, at the price of a small op."""
    made: DTensor = DTensor.__new__(DTensor, piece, spec, requires_grad=False)
    return made


def local(tensor: Tensor) -> Tensor:
    """The piece that a DTensor holds, not a copy."""
    assert isinstance(tensor, DTensor), type(tensor)
    piece: Tensor = tensor._local_tensor  # to_local is a step of autograd, which costs more than a small op
    return piece


def placements(sharding: Sharding, shape: Sequence[int], name: str = "value") -> tuple[Placement, ...]:
    """The placement on every axis of the mesh.

    Each axis cuts what the axes before it left. One that is minor to a later axis, or to a run of whole elements as in
    ``blocks``, cuts each of several stretches: a strided shard. ShardingError for what no placement can say (a part of
    an axis), or what torch would gather in a wrong order.
    """
    assert not sharding.partial, (name, sharding)
    found: dict[str, Placement] = {}
    for dim, (cut, size) in enumerate(zip(sharding.dims, shape, strict=True)):
        row = _digits(cut, size, sharding, name)
        _check_gatherable(row, sharding, f"{name}, dim {dim}")
        for axis in sharding.mesh.axis_names:
            at = next((i for i, digit in enumerate(row) if digit.axis == axis), None)
            if at is None:
                continue
            stretches = math.prod(digit.size for digit in row[:at])
            found[axis] = Shard(dim) if stretches == 1 else _StridedShard(dim, split_factor=stretches)
            row[at] = Digit(1)
    return tuple(found.get(axis, Replicate()) for axis in sharding.mesh.axis_names)


def check_order(mesh: Mesh) -> None:
    """A ShardingError for a mesh with an axis along which ranks do not ascend: torch's groups sort their ranks."""
    for name in mesh.axis_names:
        for group in mesh.groups((mesh.axis(name),)):
            ranks = [mesh.rank(position) for position in group]
            if ranks != sorted(ranks):
                raise ShardingError(
                    "mesh", f"{mesh}, ranks {ranks} along axis {name!r}", "torch gathers in the order of ranks",
                    "order the mesh so that ranks ascend along every axis",
                )  # fmt: skip


def sharding_of(placed: Sequence[Placement], shape: Sequence[int], mesh: Mesh, name: str = "value") -> Sharding:
    """The sharding that placements say; a ShardingError for a partial value, or an uneven cut that we cannot make."""
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
            raise ShardingError(
                name, f"placements {tuple(placed)}", f"{placement} on axis {axis!r} is neither cut nor whole",
                "redistribute it to Replicate or Shard first",
            )  # fmt: skip
        stretches = getattr(placement, "split_factor", 1)
        row = rows[placement.dim]
        rows[placement.dim] = _cut(row, stretches, Digit(mesh.axis_size(axis), axis), f"{name}, dim {placement.dim}")
    return Sharding(mesh, tuple(_dim_sharding(row, mesh) for row in rows))


def _digits(cut: DimSharding, size: int, sharding: Sharding, name: str) -> list[Digit]:
    row: list[Digit] = []
    for sub, axes in cut.subdims(size):
        row += [_axis_digit(part, sharding, name) for part in axes]
        row.append(Digit(ceil_div(sub, num_shards(axes))))
    return row


def _check_gatherable(row: list[Digit], sharding: Sharding, who: str) -> None:
    """What torch 2.13 gathers rightly: no whole run before or between two cuts, or the last one alone is strided."""
    axes = [digit.axis for digit in row if digit.axis]
    is_dense = all(digit.axis or digit.size == 1 for digit in row[: len(axes)])
    is_last_strided = [name for name in sharding.mesh.axis_names if name in axes] == axes and bool(row[0].axis)
    if len(axes) < 2 or is_dense or (is_last_strided and len(axes) == 2):
        return
    raise ShardingError(
        who, f"{sharding}, blocks cut by {' and '.join(axes)}", "torch does not gather such a DTensor rightly",
        "cut the blocks by one axis, and another dim by the other",
    )  # fmt: skip


def _axis_digit(part: AxisPart, sharding: Sharding, name: str) -> Digit:
    if not sharding.mesh.is_whole(part):
        axis = part.name
        raise ShardingError(
            name, f"{sharding}, cut by the part {sharding.mesh.print_part(part)} of axis {axis!r}",
            "a DTensor is cut by whole axes of the mesh only",
            f"split {axis!r} into two axes of the mesh, or leave this value whole over it",
        )  # fmt: skip
    return Digit(part.size, part.name)


def _cut(row: list[Digit], stretches: int, new: Digit, who: str) -> list[Digit]:
    """The row with a new digit after ``stretches`` of what is still whole."""
    done: list[Digit] = []
    rest = list(row)
    while stretches > 1:
        digit = rest.pop(0)
        if not digit.axis:
            taken = math.gcd(digit.size, stretches)
            stretches //= taken
            rest[:0] = [Digit(digit.size // taken)] * (digit.size > taken)
            digit = Digit(taken)
        done.append(digit)
    return done + _take(rest, new, who)


def _take(rest: list[Digit], new: Digit, who: str) -> list[Digit]:
    """The first whole run among these digits, cut by the new one."""
    at = next((i for i, digit in enumerate(rest) if not digit.axis and digit.size > 1), None)
    if at is None or rest[at].size % new.size:
        size = 1 if at is None else rest[at].size
        raise ShardingError(
            who, f"{size} elements left to cut by {new.axis}={new.size}", "the cut is uneven",
            f"choose sizes that divide by {new.size}",
        )  # fmt: skip
    return [*rest[:at], new, *[Digit(rest[at].size // new.size)] * (rest[at].size > new.size), *rest[at + 1 :]]


def _dim_sharding(row: Sequence[Digit], mesh: Mesh) -> DimSharding:
    cuts = [DimSharding((mesh.axis(digit.axis),)) if digit.axis else WHOLE for digit in row]
    return join_dim([(digit.size, cut) for digit, cut in zip(row, cuts, strict=True) if digit.size > 1 or digit.axis])


Region = tuple[tuple[int, int], ...]  # for each sub-dim, where a piece starts and how long it is


def shard(whole: Tensor, sharding: Sharding, position: int) -> Tensor:
    """The piece of a whole tensor that the rank at ``position`` holds, without padding; a view where it can be one."""
    if not sharding.cut_axes:
        return whole
    piece = _narrow(
        whole.reshape(_refined_shape(sharding, tuple(whole.shape))), region(sharding, whole.shape, position)
    )
    return piece.reshape(_piece_shape(sharding, tuple(piece.shape)))


def pad(piece: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """A piece of a value of global ``shape`` with padding, which is zero, to the size that all ranks have."""
    if tuple(piece.shape) == sharding.local_shape(tuple(shape)):
        return piece
    lengths = [length for _, length in region(sharding, shape, position)]
    fills = [chunk - length for chunk, length in zip(_chunks(sharding, shape), lengths, strict=True)]
    padded = constant_pad(piece.reshape(lengths), [n for fill in reversed(fills) for n in (0, fill)])
    return padded.reshape(sharding.local_shape(tuple(shape)))


def unpad(padded: Tensor, sharding: Sharding, shape: Sequence[int], position: int) -> Tensor:
    """A piece without its padding; a view where it can be one."""
    lengths = [length for _, length in region(sharding, shape, position)]
    chunks = _chunks(sharding, shape)
    if lengths == chunks:
        return padded
    piece = _narrow(padded.reshape(chunks), [(0, length) for length in lengths])
    return piece.reshape(_piece_shape(sharding, lengths))


def unshard(pieces: Sequence[Tensor], sharding: Sharding, shape: tuple[int, ...], name: str = "value") -> Tensor:
    """The whole tensor of ``shape`` from the padded pieces of all ranks, by position.

    Ranks that hold the same piece must agree bit for bit, padding apart: an AssertionError names the value and both
    positions.
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
            assert same_bits(piece, unpad(pieces[owner], sharding, shape, owner)), (
                f"{name}: replicas of {sharding} at positions {owner} and {position} differ"
            )
    return whole


def region(sharding: Sharding, shape: Sequence[int], position: int) -> Region:
    """Where the piece of a position lies in the whole tensor, with one dim for every sub-dim."""
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
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    own = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return own.reshape(-1).view(torch.uint8)


def _narrow(whole: Tensor, where: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(where):
        whole = whole.narrow(dim, start, length)
    return whole


def _refined_shape(sharding: Sharding, shape: Sequence[int]) -> list[int]:
    return [sub for dim, size in zip(sharding.dims, shape, strict=True) for sub, _ in dim.subdims(size)]


def _chunks(sharding: Sharding, shape: Sequence[int]) -> list[int]:
    """The size of every sub-dim on a rank, padding included."""
    subdims = [sub for dim, size in zip(sharding.dims, shape, strict=True) for sub in dim.subdims(size)]
    return [ceil_div(size, num_shards(axes)) for size, axes in subdims]


def _piece_shape(sharding: Sharding, refined: Sequence[int]) -> list[int]:
    """The sub-dims of a piece joined to the dims of the tensor."""
    sizes = iter(refined)
    return [math.prod(next(sizes) for _ in range(1 + len(dim.minor))) for dim in sharding.dims]
