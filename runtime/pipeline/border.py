"""The border of a pipeline: tensors are those of a stage's ranks, at the time of every microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.language.mesh import Mesh
from shardc.language.sharding import Sharding
from shardc.options import Pipeline
from shardc.program.program import Program

from ..comm.agreement import check_agreement
from ..comm.comm import Comm
from ..comm.distributed import TorchComm
from ..comm.dtensor import local, new_dtensor
from ..comm.simulated import SimulatedComm
from ..module.border import Border, DistributedBorder, DistributedDoor, Door, VirtualBorder
from ..module.optimizer import join_lines
from .channel import RankChannel
from .host import stored_on_host
from .step import PipelineRunner
from .timed import TimedComm, TimedDoor

MakeRunner = Callable[[Program, Comm], PipelineRunner]


def pipeline_on(mesh: Any, pipeline: Pipeline, device: torch.device) -> tuple[Border, MakeRunner]:
    """The border of a pipeline on a DeviceMesh, or on a Mesh's virtual ranks, and what makes its runners."""
    if isinstance(mesh, DeviceMesh):
        border = PipelineBorder(mesh, pipeline)
        return border, border.runner
    stage = SimulatedComm(pipeline.stage_mesh(mesh), device)
    return VirtualBorder(pipeline.compute_mesh(mesh), device), lambda program, _: PipelineRunner(program, stage)


class PipelineBorder(DistributedBorder):
    """One rank of a job: DTensors are on the mesh of its stage's ranks, which has all axes but the pipeline's."""

    def __init__(self, device_mesh: DeviceMesh, pipeline: Pipeline) -> None:
        super().__init__(stage_device_mesh(device_mesh, pipeline))
        self.job, self.pipeline = TorchComm(device_mesh), pipeline
        self.compute_mesh = pipeline.compute_mesh(Mesh.of(device_mesh))
        self.timed = self.comm = TimedComm(self.torch_comm, self.compute_mesh, range(pipeline.microbatches))
        axis = (device_mesh.mesh_dim_names or ()).index(pipeline.axis)
        lines = device_mesh.mesh.movedim(axis, -1).reshape(-1, device_mesh.shape[axis]).tolist()
        self.channel = RankChannel(lines, self.torch_comm.device)
        join_lines(self.torch_comm.device_mesh, self.channel.groups[0])

    def new_copies(self) -> None:
        """None: what is made of stored parameters is made once a step."""

    def own(self, tensor: Tensor) -> Tensor:
        """A replicated DTensor with a copy; where stages are offloaded, of a parameter in host memory."""
        found = super().own(tensor)
        if not self.pipeline.offload or not isinstance(tensor, nn.Parameter):
            return found
        assert isinstance(found, DTensor)
        return new_dtensor(stored_on_host(local(found)), found._spec)

    def placed(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """A DTensor with a copy of this rank's piece, where the tensor is; in host memory it is pinned."""
        found = super().placed(tensor, sharding.on(self.torch_comm.mesh), name)
        if not isinstance(found, DTensor) or local(found).device == self.torch_comm.device:
            return found
        return new_dtensor(local(found).pin_memory(), found._spec)

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """That of a DTensor, on the mesh of the program."""
        found = super().sharding(tensor, name)
        return None if found is None else replace(found, mesh=self.compute_mesh)

    def door(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Door:
        """A door between tensors and their pieces of every microbatch."""
        inner = DistributedDoor(self.torch_comm, sharding.on(self.torch_comm.mesh), shape, name)
        return TimedDoor(inner, self.timed, sharding, shape)

    def agree(self, program: Program) -> None:
        """Compare the collectives of all ranks of the job."""
        check_agreement(self.job, program)

    def runner(self, program: Program, comm: Comm) -> PipelineRunner:
        """The runner of this rank's stages."""
        return PipelineRunner(program, self.torch_comm, (self.channel.at,), self.channel)


def stage_device_mesh(device_mesh: DeviceMesh, pipeline: Pipeline) -> DeviceMesh:
    """The mesh of the ranks of this rank's stage; of this rank alone where there is no other axis."""
    names = device_mesh.mesh_dim_names or ()
    rest = tuple(name for name in names if name != pipeline.axis)
    if rest:
        return device_mesh[rest if len(rest) > 1 else rest[0]]
    ranks = device_mesh.mesh.reshape(-1, 1)
    return DeviceMesh(device_mesh.device_type, ranks, mesh_dim_names=("stages", pipeline.axis))[pipeline.axis]
