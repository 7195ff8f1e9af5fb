"""The groups of a job that train by themselves: their meshes, their parts of a batch, and equal initial models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.capture.annotations import Spec, dims_of_groups
from shardc.capture.call import call_leaves, part_of_call, part_of_group
from shardc.language.errors import OptionError
from shardc.language.mesh import Mesh
from shardc.options import Local

from ..comm.checksum import checksum
from ..comm.comm import Traffic
from ..comm.distributed import TorchComm, make_device_mesh, shared_device_mesh
from ..comm.dtensor import own_part
from ..comm.failure import waiting
from ..comm.process_group import all_gather
from ..comm.scatter import broadcast
from ..module.initial import check_alike


class Groups:
    """The groups into which an option divides a job's ranks; this process is in group ``index`` of ``count``.

    ``mesh``: this group's, the user's mesh with one rank along the axis. ``line``: the ranks at this position of each
    group, which store the same shards. ``key``: the module's number among those of all groups. ``is_first``: whether
    this is the first rank of its group. ``traffic``: calls and bytes that this rank sends to other groups.
    """

    def __init__(self, option: Local, device_mesh: DeviceMesh, annotations: Mapping[str, Spec], key: str) -> None:
        self.option, self.annotations, self.key = option, annotations, key
        self.comm = TorchComm(device_mesh)
        self.mesh = _mesh_of_group(device_mesh, option.axis)
        self.line = self.comm.group((self.comm.mesh.axis(option.axis),))
        self.index, self.count = self.line.index, self.line.size
        self.ranks = self.comm.ranks((option.axis,))
        self.is_first = dist.get_rank() == int(self.mesh.mesh.flatten()[0])
        self.traffic: Traffic = self.comm.traffic[0]
        self._dims: dict[tuple[Any, ...], dict[str, int]] = {}

    def part_of_call(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A call with this group's part of each input that is cut over groups."""
        leaves, _ = call_leaves(model.forward, args, kwargs)
        key = type(model), *(name for name, leaf in leaves if isinstance(leaf, Tensor))
        if key not in self._dims:
            axis = self.option.axis
            self._dims[key] = dims_of_groups(self.annotations, model, args, kwargs, self.comm.mesh, axis)
        if not self._dims[key]:
            return args, kwargs
        parts = {name: partial(self._part, dim=dim, name=name) for name, dim in self._dims[key].items()}
        return part_of_call(model.forward, args, kwargs, parts)

    def _part(self, tensor: Tensor, dim: int, name: str) -> Tensor:
        """This group's part of an input; a DTensor on the mesh of all groups becomes one on this group's mesh."""
        if not isinstance(tensor, DTensor):
            return part_of_group(tensor, self.count, self.index, dim, name)
        if tensor.device_mesh == self.mesh:
            return tensor
        shape = list(tensor.shape)
        shape[dim] //= self.count
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor.to_local(), self.mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    @torch.no_grad()
    def start_alike(self, tensors: Mapping[str, Tensor], initial: str) -> None:
        """Start all groups from the first group's values; ``check`` and ``trust`` work as for the ranks of a group."""
        if initial == "trust":
            return
        with waiting(lambda: "the first group's values for all others", self.ranks):
            if initial == "check":
                self._compare(tensors)
                return
            broadcast(list(_stored(tensors).values()), self.line, self.comm.device)

    def _compare(self, tensors: Mapping[str, Tensor]) -> None:
        stored = _stored(tensors)
        numbers = torch.stack([checksum(each).to(self.comm.device) for each in stored.values()])
        rows = [row.tolist() for row in all_gather(numbers.unsqueeze(0), self.line, 0)()]
        check_alike([repr(name) for name in stored], rows, self.ranks, "groups")


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of tensors that this rank stores, without those of other pipeline stages."""
    own = {name: own_part(each) for name, each in tensors.items()}
    return {name: each for name, each in own.items() if not each.is_meta}


def mesh_of_groups(option: Local, mesh: Any, runtime: str, device_type: str) -> DeviceMesh:
    """The DeviceMesh of all groups. Raises an OptionError for virtual ranks, which share one copy of each parameter."""
    if isinstance(mesh, DeviceMesh) and runtime != "virtual":
        return mesh
    if not isinstance(mesh, Mesh) or runtime != "distributed":
        problem = "they share one copy of each parameter, and groups have one each"
        remedy = f"start {Mesh.of(mesh).size} ranks with torchrun and give a DeviceMesh, or leave local out"
        raise OptionError(option.text, "on virtual ranks", problem, remedy)
    return make_device_mesh(mesh, device_type)


def _mesh_of_group(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh of this rank's group, with one rank along the axis; all ranks make it together."""
    names = mesh.mesh_dim_names or ()
    dim = names.index(axis)
    grid = mesh.mesh.movedim(dim, 0).unsqueeze(dim + 1)
    groups = shared_device_mesh(grid.flatten().tolist(), grid.shape, (f"{axis}_groups", *names), mesh.device_type)
    return groups[names if len(names) > 1 else names[0]]
