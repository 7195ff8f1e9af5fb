"""Data parallel peers: one device, DDP, ZeroRedundancyOptimizer, FSDP2; also with checkpoints, bfloat16, Inductor."""

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
    """The plain model on rank 0 with all processors; the other ranks wait."""
    return Trainer(model, job.adamw(model.parameters()), alone=True)


def ddp(model: Any, job: Job) -> Trainer:
    """DDP with gradients as views of its buckets, reduced once for all microbatches (``no_sync``)."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = job.adamw(parallel.parameters())
    return Trainer(parallel, optimizer, own_rows, unsynced=parallel.no_sync, settle=settle(parallel))


def ddp_checkpoint(model: Any, job: Job) -> Trainer:
    """DDP with activation checkpoints: only the input of each block is saved."""
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
    """Rebuild the buckets of DDP in the order of the first backward, as DDP does at its second step."""
    return parallel.reducer._rebuild_buckets


def fsdp2(model: Any, job: Job, **options: Any) -> Trainer:
    """FSDP2 with one unit for each block and one for the rest."""
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=job.mesh("dp"), **options)
    return Trainer(model, job.adamw(model.parameters()), own_rows)


def fsdp2_kept(model: Any, job: Job) -> Trainer:
    """FSDP2 that keeps gathered parameters for backward."""
    return fsdp2(model, job, reshard_after_forward=False)


def fsdp2_bf16(model: Any, job: Job) -> Trainer:
    """FSDP2 that gathers and computes in bfloat16 and reduces in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(model, job, mp_policy=policy)


def fsdp2_compiled(model: Any, job: Job) -> Trainer:
    """FSDP2 with each block compiled by Inductor."""
    for block in model.blocks:
        block.compile()
    return fsdp2(model, job)


def ddp_compiled(model: Any, job: Job) -> Trainer:
    """DDP with the model compiled by Inductor."""
    trainer = ddp(model, job)
    trainer.model = torch.compile(trainer.model)
    return trainer
