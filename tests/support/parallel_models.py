"""Small models that the tests of the parallel module train, alone and on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from shardc.language.mesh import Mesh
from shardc.language.partition import P, blocks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) - y).square().mean()


DATA = {"x": P("dp"), "y": P("dp")}
MEGATRON = {"down.weight": P(None, "tp"), "x": P("dp")}
MESHES = {"data": (Mesh(dp=4), DATA), "data and tensor": (Mesh(dp=2, tp=2), MEGATRON)}
FSDP = {"x": P("dp"), "*.weight": P("dp"), "*.bias": P("dp")}


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    count: int


class TiedModel(nn.Module):
    """A tied embedding, a frozen scale, a fused weight, running buffers and dropout; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.fused = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embedding(ids) * self.scale
        a, b, c = self.fused(x).chunk(3, -1)
        x = self.out(self.dropout(torch.tanh(a) * b + c))
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 1))
            self.calls += 1
        logits = self.head(x)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels is not None else logits.sum()
        return Output(loss, logits, 3)


TIED = {"ids": P("dp"), "fused.weight": P(blocks(3, "tp"))}


class Summed(nn.Module):
    """Two differentiable outputs, neither of which is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.sin()


class Detached(Summed):
    """A loss, an activation, and outputs that need no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = self.linear(x)
        return y.sum(), y.sin(), x * 2, torch.zeros(3), y.detach()


class PerRow(nn.Module):
    """A loss, the losses of the rows, and their activations; the row losses are saved for backward in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        losses = (y - target).square().mean(1)
        return (losses * losses).mean(), losses, y


class Shared(nn.Module):
    """Two parameters with one gradient, and an output that is saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x * (self.a + self.b))
        return y.mean(), y


def batch(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def doubles(seed: int, rows: int = 4) -> list[Tensor]:
    return [tensor.double() for tensor in batch(seed, rows)]


def ids(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 12, (4, 6), generator=generator) for name in ("ids", "labels")}


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}
