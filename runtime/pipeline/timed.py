"""A stage's ranks at the time of each microbatch: what the axis of microbatches is where a program runs.

A position of the program's mesh is a rank of the stage at the time of one microbatch. Ranks exchange values with those
of the same microbatch only, and sums over microbatches are the pipeline's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.language.collective_kind import LOCAL_KINDS
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import Sharding
from shardc.program.stages import is_cut_in_time

from ..comm.comm import BucketLayout, Comm, LocalCollectives, Places, Results, Rows, Tensors, Traffic
from ..comm.shards import pad, region, shard, unpad, unshard
from ..module.border import DistributedDoor


class TimedComm(LocalCollectives):
    """The collectives of a stage's ranks during some ``microbatches`` of a program's ``mesh``."""

    def __init__(self, comm: Comm, mesh: Mesh, microbatches: Sequence[int]) -> None:
        self.comm, self.mesh = comm, mesh
        self.positions = tuple(i * comm.mesh.size + position for i in microbatches for position in comm.positions)
        self.device = comm.device

    @property
    def gathers_in_place(self) -> bool:
        """As the stage's ranks."""
        return self.comm.gathers_in_place

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """That of the stage's ranks."""
        return self.comm.traffic

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Where a rank's place in time matters it is local work; the rest is the stage's."""
        if kind not in LOCAL_KINDS:
            return self.comm.start(kind, xs, *args, is_own=is_own, into=into)
        results: Tensors = getattr(self, kind)(xs, *args)
        return lambda: results

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """As the stage's ranks do."""
        return self.comm.start_bucket(layout, rows, into)


class TimedDoor:
    """Tensors to the pieces of this rank for each microbatch, and back. ``door`` is that of the stage's ranks."""

    def __init__(self, door: DistributedDoor, comm: TimedComm, value: Sharding, shape: tuple[int, ...]) -> None:
        self.door, self.comm, self.value, self.shape = door, comm, value, shape
        self.is_timed, self.is_even = is_cut_in_time(value), value.is_even(shape)
        self.time = value.on(Mesh(device_ids=None, **{MICROBATCH: comm.mesh.axis_size(MICROBATCH)}))

    def enter(self, tensor: Tensor) -> list[Tensor]:
        """The pieces of all microbatches; a value that is the same for all of them is one tensor."""
        positions = self.comm.positions
        if tensor.is_meta:  # another rank's parameter
            return [tensor] * len(positions)
        if not self.is_timed:
            return self.door.enter(tensor) * len(positions)
        if self.is_even:
            (piece,) = self.door.enter(tensor)
            return [shard(piece, self.time, i) for i in range(len(positions))]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.to(self.comm.device)
        return [pad(shard(whole, self.value, i), self.value, self.shape, i) for i in positions]

    def leave(self, pieces: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The tensor of these pieces; on meta where another stage has them."""
        if pieces[0].is_meta:
            return torch.empty(self.shape, dtype=pieces[0].dtype, device="meta")
        if not self.is_timed:
            return self.door.leave(pieces[:1], is_plain)
        if self.is_even:
            local_shape = self.door.value.local_shape(self.shape)
            return self.door.leave([unshard(pieces, self.time, local_shape, self.door.name)], is_plain)
        whole = self._joined(pieces)
        return whole if is_plain else self.door.leave(self.door.enter(whole), is_plain=False)

    def write(self, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
        """Give a buffer the value of this rank's piece."""
        self.door.write(tensor, pieces[:1])

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole, of pieces that microbatches cut unevenly: each rank puts its own in their places, then all add."""
        whole = pieces[0].new_zeros(self.shape)
        for piece, position in zip(pieces, self.comm.positions, strict=True):
            where = region(self.value, self.shape, position)
            rows = unpad(piece, self.value, self.shape, position)
            whole[tuple(slice(start, start + length) for start, length in where)] = rows
        axes = tuple(map(self.comm.mesh.print_part, self.door.value.cut_axes))
        return self.comm.comm.start("all_reduce", [whole], axes, "sum")()[0] if axes else whole
