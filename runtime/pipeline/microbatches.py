"""Microbatches at run time: each rank of a stage stands for one position in each microbatch.

The mesh of a pipeline's program has an axis of microbatches, so that a position is a rank of the stage during one
microbatch. Collectives are among positions of one microbatch; the pipeline itself adds sums over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.language.machine import LOCAL_KINDS
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import Sharding
from shardc.program.stages import is_cut_in_time

from ..comm.comm import BucketLayout, Comm, LocalCollectives, PartNames, Places, Results, Rows, Tensors
from ..comm.dtensor import pad, region, shard, unpad, unshard
from ..comm.failure import waiting
from ..module.conversion import DistributedConverter


class MicrobatchComm(LocalCollectives):
    """The collectives of a stage's ranks during the given ``microbatches`` of a program on ``mesh``."""

    def __init__(self, comm: Comm, mesh: Mesh, microbatches: Sequence[int]) -> None:
        self.comm, self.mesh = comm, mesh
        self.positions = tuple(i * comm.mesh.size + position for i in microbatches for position in comm.positions)
        self.device, self.traffic, self.gathers_in_place = comm.device, comm.traffic, comm.gathers_in_place

    def ranks(self, axes: PartNames) -> tuple[int, ...]:
        return self.comm.ranks(axes)

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Run local kinds, which depend on the microbatch, at once; start all others among the stage's ranks."""
        if kind not in LOCAL_KINDS:
            return self.comm.start(kind, xs, *args, is_own=is_own, into=into)
        results: Tensors = getattr(self, kind)(xs, *args)
        return lambda: results

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        return self.comm.start_bucket(layout, rows, into)

    def rotate(self, rows: Rows, axes: PartNames, by: int = 1) -> Callable[[], Rows]:
        return self.comm.rotate(rows, axes, by)


class MicrobatchConverter:
    """Converts between a tensor and this rank's shards of it for all microbatches.

    ``inner`` converts for the stage's ranks, without microbatches.
    """

    def __init__(self, inner: DistributedConverter, comm: MicrobatchComm, sharding: Sharding,
                 shape: tuple[int, ...]) -> None:  # fmt: skip
        self.inner, self.comm, self.sharding, self.shape = inner, comm, sharding, shape
        self.is_timed, self.is_even = is_cut_in_time(sharding), sharding.is_even(shape)
        self.time = sharding.on(Mesh(device_ids=None, **{MICROBATCH: comm.mesh.axis_size(MICROBATCH)}))

    def to_shards(self, tensor: Tensor) -> list[Tensor]:
        """The shards of all microbatches; a value that all of them share is one tensor."""
        positions = self.comm.positions
        if tensor.is_meta:  # a parameter of another rank
            return [tensor] * len(positions)
        if not self.is_timed:
            return self.inner.to_shards(tensor) * len(positions)
        if self.is_even:
            (piece,) = self.inner.to_shards(tensor)
            return [shard(piece, self.time, i) for i in range(len(positions))]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.to(self.comm.device)
        return [pad(shard(whole, self.sharding, i), self.sharding, self.shape, i) for i in positions]

    def to_tensor(self, shards: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The tensor of these shards; on meta if another stage has them."""
        if shards[0].is_meta:
            return torch.empty(self.shape, dtype=shards[0].dtype, device="meta")
        if not self.is_timed:
            return self.inner.to_tensor(shards[:1], is_plain)
        if self.is_even:
            local_shape = self.inner.sharding.local_shape(self.shape)
            return self.inner.to_tensor([unshard(shards, self.time, local_shape, self.inner.name)], is_plain)
        whole = self._joined(shards)
        return whole if is_plain else self.inner.to_tensor(self.inner.to_shards(whole), is_plain=False)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        return self.inner.zeros(dtype)

    def write(self, tensor: Tensor, shards: Sequence[Tensor]) -> None:
        self.inner.write(tensor, shards[:1])

    def _joined(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor of uneven microbatches: each rank puts its shards in place, then all ranks add theirs."""
        whole = shards[0].new_zeros(self.shape)
        for piece, position in zip(shards, self.comm.positions, strict=True):
            where = region(self.sharding, self.shape, position)
            rows = unpad(piece, self.sharding, self.shape, position)
            whole[tuple(slice(start, start + length) for start, length in where)] = rows
        axes = tuple(map(self.comm.mesh.print_part, self.inner.sharding.cut_axes))
        with waiting(lambda: f"the gather of {self.inner.name} over {', '.join(axes)}", lambda: self.comm.ranks(axes)):
            return self.comm.comm.start("all_reduce", [whole], axes, "sum")()[0] if axes else whole
