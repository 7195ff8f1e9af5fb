"""The border between a user's tensors and the pieces that ranks compute on: virtual ranks, or torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardc.error import ShardingError
from shardc.mesh import Mesh
from shardc.program import Program
from shardc.sharding import P, Sharding

from .agreement import check_agreement
from .comm import Comm, SimulatedComm
from .distributed import TorchComm, gather_whole
from .piece import global_shape, shard, unshard
from .placement import check_order, placements, sharding_of, to_dtensor


class Border(Protocol):
    """How tensors come in and go out. Pieces are a list, one for each rank that lives in this process."""

    comm: Comm

    def own(self, tensor: Tensor) -> Tensor:
        """A copy of a parameter or buffer of the user's model, whole, as the parallel model holds it."""

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """What ``own`` gave, now with a sharding."""

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """How a tensor lies already; None for a whole one."""

    def enter(self, tensor: Tensor, sharding: Sharding, name: str) -> list[Tensor]:
        """The pieces of a tensor."""

    def leave(self, pieces: Sequence[Tensor], sharding: Sharding, name: str, is_plain: bool) -> Tensor:
        """The tensor of these pieces; ``is_plain``: whole, and no DTensor."""

    def write(self, tensor: Tensor, pieces: Sequence[Tensor], sharding: Sharding, name: str) -> None:
        """Give a buffer the value of these pieces, in place."""

    def agree(self, program: Program) -> None:
        """A ShardingError if another process is about to run another program."""


class VirtualBorder:
    """All ranks in this process: every tensor of the user's is plain and whole."""

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.comm: Comm = SimulatedComm(mesh, device)

    def own(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.detach().clone()

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """The same: it is cut at every step."""
        return tensor

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """Never known: all is whole."""
        return None

    def enter(self, tensor: Tensor, sharding: Sharding, name: str) -> list[Tensor]:
        """Every rank's piece."""
        return [shard(tensor, sharding, position) for position in self.comm.positions]

    def leave(self, pieces: Sequence[Tensor], sharding: Sharding, name: str, is_plain: bool) -> Tensor:
        """The whole; an AssertionError if replicas differ."""
        return unshard(pieces, sharding, global_shape(pieces[0].shape, sharding), name)

    def write(self, tensor: Tensor, pieces: Sequence[Tensor], sharding: Sharding, name: str) -> None:
        """Give a buffer the value of these pieces."""
        tensor.copy_(self.leave(pieces, sharding, name, True))

    def agree(self, program: Program) -> None:
        """One process always does."""


class DistributedBorder:
    """One rank of a torch.distributed job: parameters and cut values are DTensors on the one mesh."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._comm = TorchComm(device_mesh)
        self.comm: Comm = self._comm
        check_order(self._comm.mesh)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that every DTensor is on."""
        return self._comm.device_mesh

    def own(self, tensor: Tensor) -> Tensor:
        """A replicated DTensor with a copy."""
        whole = Sharding.replicated(self.comm.mesh, tensor.ndim)
        copied = tensor.detach().to(self.comm.device).clone(memory_format=torch.contiguous_format)
        return to_dtensor(copied, whole, tuple(tensor.shape), self.device_mesh)

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """A DTensor with a copy of this rank's piece."""
        piece = shard(_local(tensor), sharding, self._comm.position).clone(memory_format=torch.contiguous_format)
        return to_dtensor(piece, sharding, tuple(tensor.shape), self.device_mesh, name)

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """That of a DTensor."""
        if not isinstance(tensor, DTensor):
            return None
        if tensor.device_mesh != self.device_mesh:
            raise ShardingError(
                name, f"a DTensor on {tensor.device_mesh}", f"the model is on {self.device_mesh}",
                "make it on the model's mesh, with shardc.shard_batch",
            )  # fmt: skip
        return sharding_of(tensor.placements, tensor.shape, self.comm.mesh, name)

    def enter(self, tensor: Tensor, sharding: Sharding, name: str) -> list[Tensor]:
        """One piece; of a DTensor that lies otherwise, after a redistribution by torch."""
        if not isinstance(tensor, DTensor):
            return [shard(tensor.to(self.comm.device), sharding, self._comm.position)]
        wanted = placements(sharding, tensor.shape, name)
        if tensor.placements != wanted:
            whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
            return [shard(_local(whole), sharding, self._comm.position)]
        return [_local(tensor)]

    def leave(self, pieces: Sequence[Tensor], sharding: Sharding, name: str, is_plain: bool) -> Tensor:
        """A DTensor, or the whole."""
        (piece,) = pieces
        shape = global_shape(piece.shape, sharding)
        if is_plain:
            return gather_whole(self._comm, piece, sharding, shape, name)
        return to_dtensor(piece.contiguous(), sharding, shape, self.device_mesh, name)

    def write(self, tensor: Tensor, pieces: Sequence[Tensor], sharding: Sharding, name: str) -> None:
        """Give a buffer the value of this rank's piece."""
        _local(tensor).copy_(pieces[0])

    def agree(self, program: Program) -> None:
        """Compare the collectives of all ranks."""
        check_agreement(self._comm, program)


def shard_batch(local: Tensor, device_mesh: DeviceMesh, spec: P) -> DTensor:
    """A DTensor of the pieces that all ranks hold of a batch: ``shard_batch(mine, mesh, P("dp"))``."""
    mesh = Mesh.of(device_mesh)
    probe = spec.sharding(mesh, tuple(size * mesh.size for size in local.shape), "batch")
    shape = global_shape(local.shape, probe)
    return to_dtensor(local, spec.sharding(mesh, shape, "batch"), shape, device_mesh, "batch")


def border_of(mesh: Any, device: torch.device | str = "cpu") -> Border:
    """The border of a torch DeviceMesh, or of a Mesh's virtual ranks."""
    return DistributedBorder(mesh) if isinstance(mesh, DeviceMesh) else VirtualBorder(Mesh.of(mesh), device)


def _local(tensor: Tensor) -> Tensor:
    """The piece that a DTensor holds, not a copy."""
    assert isinstance(tensor, DTensor), type(tensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local
