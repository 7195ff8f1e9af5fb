"""One way to train the model: what every plan, a peer's or shardc's, gives to the measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Job:
    """On how many ranks of which device, in which dtype, and which AdamW: ``fused``, ``foreach`` or ``loop``.

    ``microbatches``: gradients of so many are accumulated for a step.
    """

    ranks: int
    kernel: str = "fused"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    microbatches: int = 1

    def mesh(self, axis: str) -> DeviceMesh:
        """All ranks along one axis."""
        return init_device_mesh(self.device, (self.ranks,), mesh_dim_names=(axis,))

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """The optimizer; DTensors and plain tensors are in groups of their own."""
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
    """Every rank is given the global batch."""
    return ids, targets


def own_rows(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A rank is given its rows of the batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ids.chunk(ranks)[rank], targets.chunk(ranks)[rank]


@dataclass
class Trainer:
    """A model, its optimizer, and how a training step goes.

    ``feed``: what a rank takes of the batch. ``around``: a context for forward and backward; ``unsynced``: one more,
    for all microbatches but the last. ``after_backward``: what the plan does with gradients itself. ``announced``:
    bytes that a rank sends in a step by the plan, if it says so. ``alone``: on rank 0 only, with all processors.
    ``settle``: what it would do but once, at the start of its second step.
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
        """One training step; the loss, of this rank's rows where ``feed`` gives no others."""
        loss = self.update(microbatches)
        self.optimizer.zero_grad()
        return loss

    def update(self, microbatches: Tensor) -> float:
        """A step whose gradients are left. ``microbatches``: ids and targets, ``[microbatch, 2, row, token]``."""
        last = len(microbatches) - 1
        losses: list[Tensor] = []
        for i, microbatch in enumerate(microbatches):
            with nullcontext() if i == last else self.unsynced():
                losses.append(self._backward(*self.feed(*microbatch), len(microbatches)))
        if self.after_backward is not None:
            self.after_backward()
        self.optimizer.step()
        return fmean(loss.item() for loss in losses)

    def _backward(self, ids: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
        """Forward and backward of one; its loss."""
        with self.around():
            loss = self.model(ids, targets)
            (loss / num_microbatches if num_microbatches > 1 else loss).backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
