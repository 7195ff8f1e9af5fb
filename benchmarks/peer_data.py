"""Peers that cut the batch: one device, DDP, DDP with ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from trainer import Trainer, adamw, optimizer_options, own_rows


def one_device(model: Any, ranks: int, kernel: str) -> Trainer:
    """The plain model in one process, which has all processors; the other ranks wait."""
    return Trainer(model, adamw(model.parameters(), kernel), alone=True)


def ddp(model: Any, ranks: int, kernel: str) -> Trainer:
    """Gradients live in the buckets that are reduced."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(parallel, adamw(parallel.parameters(), kernel), own_rows)


def ddp_zero(model: Any, ranks: int, kernel: str) -> Trainer:
    """ZeRO-1: each rank updates some parameters and broadcasts them."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **optimizer_options(kernel)
    )
    return Trainer(parallel, optimizer, own_rows)


def fsdp2(model: Any, ranks: int, kernel: str) -> Trainer:
    """A unit a block, and one of what is left."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, adamw(model.parameters(), kernel), own_rows)


def fsdp2_compiled(model: Any, ranks: int, kernel: str) -> Trainer:
    """Each block compiled by Inductor."""
    for block in model.blocks:
        block.compile()
    return fsdp2(model, ranks, kernel)


def ddp_compiled(model: Any, ranks: int, kernel: str) -> Trainer:
    """The model compiled by Inductor."""
    trainer = ddp(model, ranks, kernel)
    trainer.model = torch.compile(trainer.model)
    return trainer
