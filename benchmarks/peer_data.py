"""Peers that cut the batch: one device, DDP, DDP with ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from trainer import Job, Trainer, own_rows


def one_device(model: Any, job: Job) -> Trainer:
    """The plain model in one process, which has all processors; the other ranks wait."""
    return Trainer(model, job.adamw(model.parameters()), alone=True)


def ddp(model: Any, job: Job) -> Trainer:
    """Gradients live in the buckets that are reduced."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(parallel, job.adamw(parallel.parameters()), own_rows)


def ddp_zero(model: Any, job: Job) -> Trainer:
    """ZeRO-1: each rank updates some parameters and broadcasts them."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **job.adamw_options
    )
    return Trainer(parallel, optimizer, own_rows)


def fsdp2(model: Any, job: Job) -> Trainer:
    """A unit a block, and one of what is left."""
    mesh = job.mesh("dp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, job.adamw(model.parameters()), own_rows)


def fsdp2_compiled(model: Any, job: Job) -> Trainer:
    """Each block compiled by Inductor."""
    for block in model.blocks:
        block.compile()
    return fsdp2(model, job)


def ddp_compiled(model: Any, job: Job) -> Trainer:
    """The model compiled by Inductor."""
    trainer = ddp(model, job)
    trainer.model = torch.compile(trainer.model)
    return trainer
