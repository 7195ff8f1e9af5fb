"""An MLP, data and tensor parallel on four virtual ranks: prints the plan, and compares results with one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P

ANNOTATIONS = {"x": P("dp"), "target": P("dp"), "down.weight": P(None, "tp")}


class MLP(nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


def mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, P]]:
    """The target of ``shardc dump examples/mlp.py:mlp --mesh dp=2,tp=2``."""
    torch.manual_seed(0)
    return MLP(), (torch.randn(32, 64), torch.randn(32, 64)), {}, ANNOTATIONS


def main() -> None:
    model, args, kwargs, annotations = mlp()
    program = shardc.compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    print(program.dump())

    loss, gradients = program.simulate(*args)
    expected = model(*args)
    expected.backward()
    print(f"loss      {loss.item():.6f}  differs from one device by {(loss - expected).abs().item():.0e}")
    for name, parameter in model.named_parameters():
        print(f"gradient  {name:12} differs from one device by {_difference(gradients[name], parameter.grad):.0e}")


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None and b is not None
    return (a - b).abs().max().item()


if __name__ == "__main__":
    main()
