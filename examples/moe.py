"""GShard's mixture of experts in plain PyTorch, trained on four virtual ranks: prints its collectives and losses.

A token goes to its two best experts. An expert has a fixed capacity for each sequence; tokens beyond it are dropped.
Sequences and experts are cut over the same axis: one all_to_all takes tokens to their experts, another back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P

Target = tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, P]]

# Each rank has sequences of its own and experts of its own. Everything else is inferred.
EXPERTS = {"x": P("ep"), "layers.*.up": P("ep")}


def top2(gates: Tensor, capacity: int) -> Tensor:
    """The weight of each token in each place of each expert, ``[sequence, token, expert, place]``.

    ``gates``: ``[sequence, token, expert]``. First choices get places first, in the order of tokens.
    """
    first = F.one_hot(gates.argmax(-1), gates.shape[-1])
    second = F.one_hot((gates * (1 - first)).argmax(-1), gates.shape[-1])
    place = first * (first.cumsum(1) - 1) + second * (second.cumsum(1) - 1 + first.sum(1, keepdim=True))
    weight = gates * (first + second)
    is_at = place.unsqueeze(-1) == torch.arange(capacity, device=gates.device)  # all False for a place beyond the last
    return (weight / weight.sum(-1, keepdim=True)).unsqueeze(-1) * is_at


class MoE(nn.Module):
    """Experts of two layers each; input and output are ``[sequence, token, width]``."""

    def __init__(self, width: int, hidden: int, experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> Tensor:
        capacity = int(2 * self.capacity_factor * x.shape[1] / len(self.up))
        combine = top2(self.gate(x).softmax(-1), capacity)
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        hidden = torch.einsum("egcm,emh->egch", sent, self.up).relu()
        return torch.einsum("gsec,egcm->gsm", combine, torch.einsum("egch,ehm->egcm", hidden, self.down))


class Model(nn.Module):
    """Layers of experts, each after a norm and with a residual connection; returns the mean squared error."""

    def __init__(self, layers: int = 2, width: int = 32, experts: int = 8, capacity_factor: float = 1.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(MoE(width, 4 * width, experts, capacity_factor) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return F.mse_loss(x, target)


def moe() -> Target:
    """The target of ``shardc dump examples/moe.py:moe --mesh ep=4``."""
    torch.manual_seed(0)
    return Model(), (torch.randn(8, 16, 32), torch.randn(8, 16, 32)), {}, EXPERTS


def main() -> None:
    model, args, _, annotations = moe()
    parallel = shardc.parallelize(model, Mesh(ep=4), annotations, args=args)
    counts = Counter((each.phase, each.kind, each.local_shape_in) for each in parallel.program.collectives)
    for (phase, kind, shape), count in sorted(counts.items()):
        print(f"{phase:8} {count} x {kind:10} of {list(shape)}")
    runs = [(run, torch.optim.AdamW(run.parameters(), lr=0.01)) for run in (model, parallel)]
    for step in range(5):
        losses = [_step(run, optimizer, args) for run, optimizer in runs]
        print(f"step {step}  one device {losses[0]:.6f}  4 ranks {losses[1]:.6f}")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, args: tuple[Any, ...]) -> float:
    loss: Tensor = model(*args)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
