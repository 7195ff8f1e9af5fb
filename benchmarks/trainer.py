"""What all rows of the benchmark share: model sizes, batches, and the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Config
from moe import MoE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Size:
    """A model's config and the number of rows in a global batch."""

    config: Config
    batch: int = 8

    def shorter(self, parts: int) -> Size:
        """The size of one of ``parts`` microbatches: all rows, and an equal part of their tokens."""
        return replace(self, config=replace(self.config, context=self.config.context // parts))


SIZES = {
    "tiny": Size(Config(vocab=256, context=64, layers=2, heads=4, width=64, fused=False)),
    "small": Size(Config(vocab=4096, context=256, layers=4, heads=4, width=256, fused=False)),  # 5.3 M parameters
    "medium": Size(Config(vocab=8192, context=256, layers=8, heads=8, width=512, fused=False)),  # 34 M
}
NUM_BATCHES = 4
NUM_EXPERTS = 8
PIPED = 8  # microbatches that a pipeline cuts a batch into: a row each


def new_model(size: Size, has_experts: bool = False, seed: int = 0) -> nn.Module:
    """A GPT with the same weights at every call; if it ``has_experts``, every other block has them (GShard)."""
    torch.manual_seed(seed)
    model = GPT(size.config)
    for block in list(model.blocks)[1::2] if has_experts else ():
        block.mlp = MoE(size.config.width, 4 * size.config.width, NUM_EXPERTS, capacity_factor=1.0)
    return model


def batches(size: Size, device: str = "cpu", microbatches: int = 1) -> list[Tensor]:
    """Global batches, used in turn: ids and targets, ``[microbatch, 2, row, token]``."""
    random = torch.Generator().manual_seed(1)
    shape = (microbatches, 2, size.batch, size.config.context)
    return [torch.randint(size.config.vocab, shape, generator=random).to(device) for _ in range(NUM_BATCHES)]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: ranks, device, dtype, and the kernel of AdamW (``fused``, ``foreach`` or ``loop``).

    Each step accumulates the gradients of ``microbatches`` microbatches.
    """

    ranks: int
    kernel: str = "fused"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    microbatches: int = 1

    def mesh(self, axis: str) -> DeviceMesh:
        """A DeviceMesh of all ranks along one axis."""
        return init_device_mesh(self.device, (self.ranks,), mesh_dim_names=(axis,))

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """The optimizer, with DTensors and plain tensors in separate parameter groups."""
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return torch.optim.AdamW([{"params": group} for group in groups.values()], **self.adamw_options)

    @property
    def adamw_options(self) -> dict[str, Any]:
        """AdamW's arguments."""
        return {"lr": LEARNING_RATE, "fused": self.kernel == "fused", "foreach": self.kernel == "foreach"}


Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def whole(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The whole global batch, which every rank takes."""
    return ids, targets


def own_rows(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the batch that this rank trains on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ids.chunk(ranks)[rank], targets.chunk(ranks)[rank]


@dataclass
class Trainer:
    """A model, its optimizer, and how to take a training step.

    ``feed`` picks this rank's part of the batch. ``around`` is a context for forward and backward, ``unsynced`` another
    context for all microbatches but the last. ``after_backward`` reduces gradients that the plan does not reduce by
    itself. ``announced``: the bytes that a rank sends in a step according to the plan, if it predicts them. ``alone``:
    the model trains on rank 0 only, with all processors. ``settle`` does the work that the peer itself would do once,
    at the start of its second step.
    """

    model: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    feed: Feed = whole
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext
    after_backward: Callable[[], None] | None = None
    announced: int | None = None
    alone: bool = False
    settle: Callable[[], object] | None = None

    def step(self, microbatches: Tensor) -> float:
        """Take one training step; returns the loss of the rows that ``feed`` picked."""
        loss = self.update(microbatches)
        self.optimizer.zero_grad()
        return loss

    def update(self, microbatches: Tensor) -> float:
        """Take a step and keep the gradients. ``microbatches``: ids and targets, ``[microbatch, 2, row, token]``."""
        last = len(microbatches) - 1
        losses: list[Tensor] = []
        for i, microbatch in enumerate(microbatches):
            with nullcontext() if i == last else self.unsynced():
                losses.append(self._backward(*self.feed(*microbatch), len(microbatches)))
        if self.after_backward is not None:
            self.after_backward()
        self.optimizer.step()
        return fmean(loss.item() for loss in losses)

    @torch.no_grad()
    def loss(self, microbatches: Tensor) -> float:
        """The loss of the rows that ``feed`` picks; changes no parameter."""
        losses = [self.model(*self.feed(*microbatch)) for microbatch in microbatches]
        return fmean(loss.item() for loss in losses)

    def _backward(self, ids: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
        """Run forward and backward of one microbatch; returns its loss."""
        with self.around():
            loss = self.model(ids, targets)
            (loss / num_microbatches if num_microbatches > 1 else loss).backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
