"""The border between a user's tensors and the pieces that ranks compute on: virtual ranks, or torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardc.language.errors import ShardingError, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import Sharding, num_shards
from shardc.program.program import Program

from ..comm.agreement import check_agreement
from ..comm.comm import Comm
from ..comm.distributed import TorchComm, gather_whole
from ..comm.dtensor import DTensorMaker, check_order, local, placements, sharding_of, to_dtensor
from ..comm.shards import pad, shard, unpad, unshard
from ..comm.simulated import SimulatedComm
from .copies import Copies


class Door(Protocol):
    """Where one input or output of a program passes: its sharding, shape and name are settled."""

    def enter(self, tensor: Tensor) -> list[Tensor]:
        """The pieces of a tensor."""

    def leave(self, pieces: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The tensor of these pieces; ``is_plain``: whole, and no DTensor."""

    def write(self, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
        """Give a buffer the value of these pieces, in place."""


class Border(Protocol):
    """How tensors come in and go out. Pieces are a list, one for each rank that lives in this process."""

    comm: Comm

    def new_copies(self) -> Copies | None:
        """Where what is made of stored parameters is kept; None where it is made for every call."""

    def own(self, tensor: Tensor) -> Tensor:
        """A copy of a parameter or buffer of the user's model, whole, as the parallel model holds it."""

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """What ``own`` gave, now with a sharding."""

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """How a tensor lies already; None for a whole one."""

    def door(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Door:
        """The door for a value of a program, of a global shape."""

    def check(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """A ShardingError for what a model holds, by kind and name, and no ``own`` gave."""

    def agree(self, program: Program) -> None:
        """A ShardingError if another process is about to run another program."""


class VirtualBorder:
    """All ranks in this process: every tensor of the user's is plain and whole."""

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.comm: Comm = SimulatedComm(mesh, device)

    def new_copies(self) -> None:
        """None: a write through ``.data`` of a plain tensor cannot be seen."""

    def own(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.detach().clone()

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """The same: it is cut at every step."""
        return tensor

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """Never known: all is whole."""
        return None

    def door(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Door:
        """A door that cuts and joins."""
        return VirtualDoor(sharding, shape, name, self.comm.device)

    def check(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """All are plain, and may be any."""

    def agree(self, program: Program) -> None:
        """One process always does."""


@dataclass(frozen=True, slots=True)
class VirtualDoor:
    """Whole tensors to the pieces of every rank, and back."""

    value: Sharding
    shape: tuple[int, ...]
    name: str
    device: torch.device

    def enter(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's piece."""
        tensor = tensor.to(self.device)
        pieces = [shard(tensor, self.value, position) for position in range(self.value.mesh.size)]
        return [pad(piece, self.value, self.shape, position) for position, piece in enumerate(pieces)]

    def leave(self, pieces: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The whole; an AssertionError if replicas differ."""
        return unshard(pieces, self.value, self.shape, self.name)

    def write(self, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
        """Give a buffer the value of these pieces."""
        tensor.copy_(self.leave(pieces, is_plain=True))


class DistributedBorder:
    """One rank of a torch.distributed job: parameters and cut values are DTensors on the one mesh."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.torch_comm = TorchComm(device_mesh)
        self.comm: Comm = self.torch_comm
        check_order(self.torch_comm.mesh)

    def new_copies(self) -> Copies | None:
        """They are kept."""
        return Copies()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that every DTensor is on."""
        return self.torch_comm.device_mesh

    def own(self, tensor: Tensor) -> Tensor:
        """A replicated DTensor with a copy; of a DTensor, which holds a shard already, one that lies as it does."""
        if (lies := self.sharding(tensor, "parameter")) is not None:
            return to_dtensor(local(tensor).clone(), lies, tuple(tensor.shape), self.device_mesh)
        whole = Sharding.replicated(self.torch_comm.mesh, tensor.ndim)
        copied = tensor.detach().to(self.torch_comm.device).clone(memory_format=torch.contiguous_format)
        return to_dtensor(copied, whole, tuple(tensor.shape), self.device_mesh)

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """A DTensor with a copy of this rank's piece."""
        lies = self.sharding(tensor, name)
        if lies == sharding:
            return tensor
        if lies is not None and lies.cut_axes:
            assert isinstance(tensor, DTensor)
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        piece = shard(local(tensor), sharding, self.torch_comm.position).clone(memory_format=torch.contiguous_format)
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
        return sharding_of(tensor.placements, tensor.shape, self.torch_comm.mesh, name)

    def door(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Door:
        """A door between DTensors and local tensors."""
        return DistributedDoor(self.torch_comm, sharding, shape, name)

    def check(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """A parameter is a DTensor, or on meta where another stage has it."""
        plain = [
            name for (kind, name), tensor in tensors.items()
            if kind == "parameter" and not isinstance(tensor, DTensor) and not tensor.is_meta
        ]  # fmt: skip
        what, problem = "a plain tensor", "it was put into the module that parallelize returned"
        remedy = "put it into the model and call parallelize again: an optimizer needs the DTensor that is made of it"
        raise_all([ShardingError(f"parameter {name!r}", what, problem, remedy) for name in plain])

    def agree(self, program: Program) -> None:
        """Compare the collectives of all ranks."""
        check_agreement(self.torch_comm, program)


class DistributedDoor:
    """Plain global tensors or DTensors to the piece of this rank, and back.

    A DTensor may be unable to lie as the value does: then it is cut as far as it can, and passes by way of the whole.

    State: ``_spec``, torch's of the latest DTensor that lies as the value does: a parameter's is one object.
    """

    def __init__(self, comm: TorchComm, sharding: Sharding, shape: tuple[int, ...], name: str) -> None:
        self.comm, self.value, self.shape, self.name = comm, sharding, shape, name
        self._spec: object = None

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """How a DTensor lies that passes; a ShardingError where no DTensor can lie so."""
        return placements(self.stored, self.shape, self.name)

    @cached_property
    def make(self) -> DTensorMaker:
        """What makes a DTensor of this rank's piece."""
        return DTensorMaker(self.stored, self.shape, self.comm.device_mesh, self.name)

    @cached_property
    def _is_padded(self) -> bool:
        return not self.value.is_even(self.shape)

    @cached_property
    def stored(self) -> Sharding:
        """How a DTensor lies that passes."""
        return self.value.storable(self.shape)

    def enter(self, tensor: Tensor) -> list[Tensor]:
        """One piece; of a DTensor that lies otherwise, after a redistribution by torch."""
        if isinstance(tensor, DTensor) and tensor._spec is self._spec:
            return [tensor._local_tensor]
        piece = self._piece(tensor)
        return [pad(piece, self.value, self.shape, self.comm.position) if self._is_padded else piece]

    def _piece(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return shard(tensor.to(self.comm.device), self.value, self.comm.position)
        if tensor.placements == self.placements and self.stored == self.value:
            self._spec = None if self._is_padded else tensor._spec
            return local(tensor)
        whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return shard(local(whole), self.value, self.comm.position)

    def leave(self, pieces: Sequence[Tensor], is_plain: bool) -> Tensor:
        """A DTensor, or the whole."""
        if is_plain:
            return self._gathered(pieces)
        return self.make(self._stored_piece(pieces).contiguous())

    def write(self, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
        """Give a buffer the value of this rank's piece."""
        local(tensor).copy_(self._stored_piece(pieces))

    def _stored_piece(self, pieces: Sequence[Tensor]) -> Tensor:
        if not self._is_padded:  # and a DTensor can lie so
            return pieces[0]
        if self.stored != self.value:
            return shard(self._gathered(pieces), self.stored, self.comm.position)
        return unpad(pieces[0], self.value, self.shape, self.comm.position)

    def _gathered(self, pieces: Sequence[Tensor]) -> Tensor:
        return gather_whole(self.comm, pieces[0], self.value, self.shape, self.name)


def shard_batch(local: Tensor, device_mesh: DeviceMesh, spec: P) -> DTensor:
    """A DTensor of the pieces that all ranks hold of a batch, of one shape: ``shard_batch(mine, mesh, P("dp"))``."""
    if not isinstance(device_mesh, DeviceMesh):
        problem, remedy = "ranks that hold pieces are those of a job", "give the DeviceMesh of init_device_mesh"
        raise ShardingError("shard_batch", f"the mesh {device_mesh!r}", problem, remedy)
    if not isinstance(spec, P):
        raise ShardingError("shard_batch", repr(spec), "it is no P", "write for example P('dp')")
    mesh = Mesh.of(device_mesh)
    probe = spec.sharding(mesh, tuple(size * mesh.size for size in local.shape), "batch")
    shape = tuple(size * num_shards(cut.all_axes) for size, cut in zip(local.shape, probe.dims, strict=True))
    return to_dtensor(local, spec.sharding(mesh, shape, "batch"), shape, device_mesh, "batch")


def border_of(mesh: Any, device: torch.device | str = "cpu") -> Border:
    """The border of a torch DeviceMesh, or of a Mesh's virtual ranks."""
    return DistributedBorder(mesh) if isinstance(mesh, DeviceMesh) else VirtualBorder(Mesh.of(mesh), device)
