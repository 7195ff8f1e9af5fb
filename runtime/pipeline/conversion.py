"""Conversion between a user's tensors and the shards of a stage's ranks, for all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.language.mesh import Mesh
from shardc.language.sharding import Sharding
from shardc.options import Pipeline, Zero
from shardc.program.program import Program

from ..comm.comm import Comm
from ..comm.distributed import shared_device_mesh
from ..comm.dtensor import local
from ..comm.simulated import SimulatedComm
from ..module.conversion import (
    Arrival,
    Conversion,
    Converter,
    DistributedConversion,
    DistributedConverter,
    VirtualConversion,
)
from ..module.optimizer import share_overflows
from ..tensor.global_tensor import new_global_tensor
from ..tier.host import stored_on_host
from .channel import RankChannel
from .microbatches import MicrobatchComm, MicrobatchConverter
from .runner import PipelineRunner

MakeRunner = Callable[[Program, Comm], PipelineRunner]


def pipeline_on(
    mesh: Any, pipeline: Pipeline, device: torch.device, zero: Zero | None = None
) -> tuple[Conversion, MakeRunner]:
    """The conversion of tensors for a pipeline on a DeviceMesh or a Mesh of virtual ranks, and a factory of runners."""
    if isinstance(mesh, DeviceMesh):
        conversion = PipelineConversion(mesh, pipeline, zero)
        return conversion, conversion.runner
    stage = SimulatedComm(pipeline.stage_mesh(mesh), device)
    return VirtualConversion(pipeline.compute_mesh(mesh), device), lambda program, _: PipelineRunner(program, stage)


class PipelineConversion(DistributedConversion):
    """One rank of a job: its DTensors are on the mesh of its stage's ranks, which lacks the pipeline's axis."""

    def __init__(self, device_mesh: DeviceMesh, pipeline: Pipeline, zero: Zero | None = None) -> None:
        names = device_mesh.mesh_dim_names or ()
        rest = tuple(name for name in names if name != pipeline.axis)
        if rest:
            stage_mesh = device_mesh[rest if len(rest) > 1 else rest[0]]
        else:  # a stage is one rank
            ranks, named = device_mesh.mesh.tolist(), ("stages", pipeline.axis)
            stages = shared_device_mesh(ranks, (len(ranks), 1), named, device_mesh.device_type)
            stage_mesh = stages[pipeline.axis]
        super().__init__(stage_mesh, device_mesh, zero)
        self.ranks: list[int] = device_mesh.mesh.flatten().tolist()
        self.pipeline = pipeline
        self.compute_mesh = pipeline.compute_mesh(Mesh.of(device_mesh))
        self.timed = self.comm = MicrobatchComm(self.torch_comm, self.compute_mesh, range(pipeline.microbatches))
        axis = names.index(pipeline.axis)
        lines = device_mesh.mesh.movedim(axis, -1).reshape(-1, device_mesh.shape[axis]).tolist()
        self.channel = RankChannel(lines, self.torch_comm.device, pipeline.axis)
        share_overflows(self.torch_comm.device_mesh, self.agreement, self.channel.process_groups[0])

    def gathered_parameters(self) -> None:
        """None: a pipeline gathers stored parameters once a step."""

    def copy(self, tensor: Tensor) -> Tensor:
        """A replicated DTensor with a copy; with offloading, a parameter's copy is in host memory."""
        copy = super().copy(tensor)
        if not self.pipeline.offload or not isinstance(tensor, nn.Parameter):
            return copy
        assert isinstance(copy, DTensor)
        return new_global_tensor(stored_on_host(local(copy)), copy._spec)

    def _position(self, position: int) -> int:
        mesh = self.job.mesh
        return mesh.index(position, tuple(mesh.axis(name) for name in mesh.axis_names if name != self.pipeline.axis))

    def _stores(self, position: int, arrival: Arrival) -> bool:
        coordinate = self.job.mesh.coordinate(position, self.job.mesh.axis(self.pipeline.axis))
        return arrival.homes is None or coordinate in arrival.homes

    def _empty(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        is_offloaded = self.pipeline.offload and isinstance(tensor, nn.Parameter)
        piece = super()._empty(tensor, shape)
        return stored_on_host(piece) if is_offloaded else piece

    def place(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """A DTensor with a copy of this rank's shard, on the tensor's device; in host memory it is pinned."""
        placed = super().place(tensor, sharding.on(self.torch_comm.mesh), name)
        if not isinstance(placed, DTensor) or local(placed).device == self.torch_comm.device or self.tier is not None:
            return placed
        return new_global_tensor(local(placed).pin_memory(), placed._spec)

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """The sharding of a DTensor, on the mesh of the program."""
        sharding = super().sharding(tensor, name)
        return None if sharding is None else replace(sharding, mesh=self.compute_mesh)

    def converter(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Converter:
        inner = DistributedConverter(self.torch_comm, sharding.on(self.torch_comm.mesh), shape, name)
        return MicrobatchConverter(inner, self.timed, sharding, shape)

    def runner(self, program: Program, comm: Comm) -> PipelineRunner:
        """The runner of this rank's stages."""
        return PipelineRunner(program, self.torch_comm, (self.channel.at,), self.channel)
