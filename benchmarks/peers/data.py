"""Peers that cut the batch: one device, DDP, DDP with ZeroRedundancyOptimizer, FSDP2; with checkpoints, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainer import Job, Trainer, own_rows


def one_device(model: Any, job: Job) -> Trainer:
    """The plain model in one process, which has all processors; the other ranks wait."""
    return Trainer(model, job.adamw(model.parameters()), alone=True)


def ddp(model: Any, job: Job) -> Trainer:
    """Gradients live in the buckets that are reduced, once for all microbatches (``no_sync``)."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = job.adamw(parallel.parameters())
    return Trainer(parallel, optimizer, own_rows, unsynced=parallel.no_sync, settle=settle(parallel))


def ddp_checkpoint(model: Any, job: Job) -> Trainer:
    """Of each block only the input is saved; it runs again in backward."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return ddp(model, job)


def ddp_zero(model: Any, job: Job) -> Trainer:
    """ZeRO-1: each rank updates some parameters and broadcasts them."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **job.adamw_options
    )
    return Trainer(parallel, optimizer, own_rows, settle=settle(parallel))


def settle(parallel: DistributedDataParallel) -> Callable[[], object]:
    """DDP begins its second step with new buckets, in the order in which gradients came in the first."""
    return parallel.reducer._rebuild_buckets


def fsdp2(model: Any, job: Job, **options: Any) -> Trainer:
    """A unit a block, and one of what is left."""
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=job.mesh("dp"), **options)
    return Trainer(model, job.adamw(model.parameters()), own_rows)


def fsdp2_kept(model: Any, job: Job) -> Trainer:
    """What is gathered in forward is kept for backward."""
    return fsdp2(model, job, reshard_after_forward=False)


def fsdp2_bf16(model: Any, job: Job) -> Trainer:
    """Gathered and computed in bfloat16, reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(model, job, mp_policy=policy)


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
