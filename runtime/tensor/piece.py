"""Pieces of DTensors: gathers a whole tensor from the pieces of all ranks, and cuts this rank's piece of a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.language.mesh import Mesh
from shardc.language.sharding import WHOLE, Sharding

from ..comm.distributed import own_position
from ..comm.dtensor import shard, sharding_of
from .reading import enter_reading


def is_whole(tensor: DTensor) -> bool:
    """Whether every rank holds all of a DTensor."""
    for placement in tensor._spec.placements:  # this is called for every operand of every op: no generator
        if type(placement) is not Replicate:
            return False
    return True


def cut_dims(tensor: DTensor) -> set[int] | None:
    """The cut dims; None if ranks hold parts of a sum."""
    cut = set()
    for placement in tensor._spec.placements:
        if isinstance(placement, (Shard, _StridedShard)):
            cut.add(placement.dim)
        elif type(placement) is not Replicate:
            return None
    return cut


def is_cut_alike(spec: Any, other: Any) -> bool:
    """Whether DTensors with these specs have the same placements on the same mesh."""
    return spec is other or bool(spec.placements == other.placements and spec.mesh == other.mesh)


def whole(tensor: DTensor, op: str) -> Tensor:
    """The whole of a DTensor as a plain tensor: a collective, unless every rank holds it. ``op``: its reader."""
    if is_whole(tensor):
        return tensor._local_tensor
    enter_reading(tensor, op)
    return as_dtensor(tensor).redistribute(placements=[Replicate()] * tensor._spec.mesh.ndim)._local_tensor


def as_dtensor(tensor: DTensor) -> DTensor:
    """The same pieces as a DTensor of torch's own class, without a gradient."""
    result: DTensor = DTensor.__new__(DTensor, tensor._local_tensor, tensor._spec, requires_grad=False)
    return result


def piece_of(value: Tensor, spec: Any, shape: Sequence[int]) -> Tensor:
    """This rank's piece of a whole value that can be broadcast to ``shape``, cut like a DTensor of that shape."""
    sharding, position = _sharding(spec.mesh, spec.placements, tuple(shape))
    own = sharding.dims[len(shape) - value.ndim :]
    dims = tuple(WHOLE if size == 1 else dim for size, dim in zip(value.shape, own, strict=True))
    return shard(value, Sharding(sharding.mesh, dims), position)


@lru_cache(maxsize=1024)
def _sharding(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> tuple[Sharding, int]:
    """The sharding of a DTensor, and the position of this rank."""
    return sharding_of(placements, shape, Mesh.of(mesh)), own_position(mesh)


def spec_like(spec: Any, placements: Sequence[Placement], piece: Tensor, shape: Sequence[int]) -> Any:
    """The spec of a DTensor of global ``shape`` with this piece, on the mesh of another spec."""
    is_cut = any(type(placement) is not Replicate for placement in placements)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))) if is_cut else piece.stride()
    meta = type(spec.tensor_meta)(torch.Size(shape), stride, piece.dtype)
    make: Any = type(spec)
    return _spec(make, spec.mesh, tuple(placements), meta)


@lru_cache(maxsize=4096)
def _spec(make: Callable[..., Any], mesh: DeviceMesh, placements: tuple[Placement, ...], meta: Any) -> Any:
    return make(mesh, placements, tensor_meta=meta)


def with_dims(placements: Sequence[Placement], dims: Sequence[int]) -> tuple[Placement, ...]:
    """Placements of a tensor whose dim i is dim ``dims[i]`` of another; -1 is a new dim. Has all cut dims."""
    return tuple(each if type(each) is Replicate else _moved(each, dims) for each in placements)


def _moved(placement: Any, dims: Sequence[int]) -> Placement:
    dim = dims.index(placement.dim)
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def from_all(value: Tensor, tensor: DTensor, op: str) -> Tensor:
    """All-gather: ``value`` of each rank that holds a different piece of a DTensor, as rows. ``op``: its reader."""
    enter_reading(tensor, op)
    spec = tensor._spec
    ranks = [Replicate() if type(placement) is Replicate else Shard(0) for placement in spec.placements]
    rows = DTensor.from_local(value.unsqueeze(0), spec.mesh, ranks, run_check=False)
    return rows.redistribute(placements=[Replicate()] * spec.mesh.ndim)._local_tensor
