"""What DTensor and torch's own plans get wrong without a word is right here, on virtual ranks and on gloo.

Measured on torch 2.13: losses whose rows do not divide (10 rows on 4 ranks: 0.0530 for 0.0619, 5 rows: nan), a
convolution over a cut height, a view that no longer lines up with the cut (pytorch#179502), a nested cut of 5 rows
(pytorch#194457), tied embeddings, a permutation of two or more dims.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P
from shardc.runtime.comm.distributed import make_device_mesh

ONE, TWO = Mesh(dp=4), Mesh(dp=2, tp=2)


class Calls(nn.Module):
    """A function of a weight and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], weight: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, torch.Size(weight).numel()).view(weight))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


class Tied(nn.Module):
    """One weight that looks up and that projects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.middle(self.embedding(ids)).tanh()).flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its input, and annotations on a mesh; trained for three steps of SGD."""

    make: Callable[[], nn.Module]
    x: Tensor
    mesh: Mesh
    annotations: dict[str, P] = field(default_factory=dict)


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def half(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.25)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, **how: F.mse_loss(x, half(x), **how),
    "l1": lambda x, **how: F.l1_loss(x, half(x), **how),
    "huber": lambda x, **how: F.huber_loss(x, half(x), delta=0.3, **how),
    "smooth_l1": lambda x, **how: F.smooth_l1_loss(x, half(x), beta=0.3, **how),
    "bce": lambda x, **how: F.binary_cross_entropy(x.sigmoid(), half(x), **how),
    "bce with logits": lambda x, **how: F.binary_cross_entropy_with_logits(x, half(x), **how),
    "kl": lambda x, **how: F.kl_div(x.log_softmax(1), half(x), **how),
    "soft margin": lambda x, **how: F.soft_margin_loss(x, half(x).sign(), **how),
    "poisson": lambda x, **how: F.poisson_nll_loss(x, half(x), **how),
    "cross entropy": lambda x, **how: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], **how),
    "cosine": lambda x, **how: F.cosine_embedding_loss(x, half(x), torch.ones(x.shape[0], dtype=x.dtype), **how),
}


def loss_case(name: str, count: int, reduction: str) -> Case:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        found = LOSSES[name](x @ weight, reduction=reduction)
        return found.sum() if reduction == "none" else found

    return Case(lambda: Calls(run, (6, 4)), rows(count, 6), ONE, {"x": P("dp")})


def annotated(*specs: P) -> Callable[[Tensor, Tensor], Tensor]:
    """Values placed one way, then another; each element counts differently in the sum."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        for spec in specs:
            x = shardc.annotate(x * 1.5, spec)
        return (x * weight).sum()

    return run


CASES: dict[str, Case] = {
    **{f"{name}, {count} rows, {reduction}": loss_case(name, count, reduction)
       for name in LOSSES for count in (10, 5) for reduction in ("mean", "sum", "none")},
    "a convolution over a cut height": Case(
        lambda: Calls(lambda x, weight: F.conv2d(x, weight, padding=1).square().sum(), (3, 2, 3, 3)),
        rows(2, 2, 8, 6), ONE, {"x": P(None, None, "dp")},
    ),
    "a strided convolution over a cut height and width": Case(
        lambda: Calls(lambda x, weight: F.conv2d(x, weight, stride=2, padding=1).square().sum(), (3, 2, 3, 3)),
        rows(2, 2, 8, 8), TWO, {"x": P(None, None, "dp", "tp")},
    ),
    "a view that does not line up with the cut": Case(
        lambda: Calls(lambda x, weight: (x.reshape(16, 6) * weight).sin().sum(), (16, 6)),
        rows(12, 8), ONE, {"x": P(None, "dp")},
    ),
    "a nested cut of 5 rows": Case(
        lambda: Calls(annotated(P(("dp", "tp")), P(), P(("tp", "dp")), P()), (5, 3)), rows(5, 3), TWO, {"x": P("dp")}
    ),
    "tied embeddings": Case(Tied, torch.arange(8).view(4, 2), TWO, {"ids": P("dp"), "embedding.weight": P("tp")}),
    "tied embeddings cut along their width": Case(
        Tied, torch.arange(8).view(4, 2), TWO, {"ids": P("dp"), "embedding.weight": P(None, "tp")}
    ),
    "a permutation of two dims": Case(
        lambda: Calls(annotated(P("dp", "tp"), P("tp", "dp"), P(("dp", "tp")), P(("tp", "dp"))), (4, 8)),
        rows(4, 8), TWO,
    ),
    "a permutation of three dims": Case(
        lambda: Calls(annotated(P("dp", None, "tp"), P("tp", None, "dp"), P(None, "dp", "tp")), (4, 2, 6)),
        rows(4, 2, 6), TWO,
    ),
}  # fmt: skip


def train(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of three steps, and the parameters after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
    found = [parameter.detach() for parameter in model.parameters()]
    return [loss.detach() for loss in losses], [
        getattr(each, "full_tensor", lambda each=each: each)() for each in found
    ]


def assert_same(name: str, mesh: Any) -> None:
    case = CASES[name]
    alone = case.make().double()
    parallel = shardc.parallelize(copy.deepcopy(alone), mesh, case.annotations)
    torch.testing.assert_close(train(parallel, case.x), train(alone, case.x), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", CASES)
def test_cases_that_torch_gets_wrong_are_right_on_virtual_ranks(name: str) -> None:
    assert_same(name, CASES[name].mesh)


@functools.cache
def device_mesh(mesh: Mesh) -> Any:
    return make_device_mesh(mesh)


def run_on_gloo(name: str) -> None:
    assert_same(name, device_mesh(CASES[name].mesh))


MEASURED = [f"{name}, {count} rows, mean" for name in ("mse", "huber", "bce", "bce with logits") for count in (10, 5)]
OTHERS = [name for name in CASES if " rows, " not in name]


@pytest.mark.parametrize("name", [*MEASURED, *OTHERS])
def test_cases_that_torch_gets_wrong_are_right_on_gloo(gloo: Any, name: str) -> None:
    gloo.run(run_on_gloo, name)
