"""Pipeline parallel peers: torch.distributed.pipelining, with handwritten stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from trainer import PIPED, Job, Trainer


class Blocks(nn.Module):
    """A rank's stage of a GPT: its share of the blocks; the first also has the embeddings, the last the head."""

    def __init__(self, gpt: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(gpt.blocks)
        self.blocks = gpt.blocks[rank * count // ranks : (rank + 1) * count // ranks]
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        if self.is_first:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        if self.is_last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Ids or activations ``[row, token, width]`` in; activations, or logits on the last stage, out."""
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


@dataclass
class StageTrainer(Trainer):
    """A trainer whose ``model`` is one of torch's schedules: one call runs a whole step."""

    def update(self, microbatches: Tensor) -> float:
        """Take a step and keep the gradients; returns the loss on the last rank, NaN on other ranks."""
        (ids, targets), losses = microbatches[0], list[Tensor]()
        if dist.get_rank() == dist.get_world_size() - 1:
            self.model(target=targets, losses=losses)
        else:
            self.model(*((ids,) if dist.get_rank() == 0 else ()))
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if losses else float("nan")


def one_forward_one_backward(model: Any, job: Job) -> Trainer:
    """The 1F1B schedule: in the steady state one backward follows each forward."""
    return _scheduled(model, job, Schedule1F1B)


def gpipe(model: Any, job: Job) -> Trainer:
    """The GPipe schedule: all forwards, then all backwards."""
    return _scheduled(model, job, ScheduleGPipe)


def _scheduled(model: Any, job: Job, schedule: Any) -> Trainer:
    """One stage on each rank, with equally many blocks."""
    rank = dist.get_rank()
    part = Blocks(model, rank, job.ranks)
    stage = PipelineStage(part, rank, job.ranks, torch.device(job.device))
    return StageTrainer(schedule(stage, PIPED, loss_fn=_loss).step, job.adamw(part.parameters()))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
