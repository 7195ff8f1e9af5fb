"""A module within an activation checkpoint gives the gradients of one without, or an error if it draws numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardc
from shardc import P
from shardc.language.errors import OrderError

PLAN = {"input:input": P("dp"), "2.weight": P(None, "dp")}


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(dropout)).double()


def gradients(of: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Those of the parameters and of the input, after two steps without an optimizer."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    for _ in range(2):
        call(of, x.sin()).square().sum().backward()
    found = [each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad for each in of.parameters()]
    assert x.grad is not None
    return [*found, x.grad]


def in_checkpoint(of: nn.Module, x: Tensor, use_reentrant: bool) -> Tensor:
    return checkpoint(lambda x: of(x.exp()).cos(), x, use_reentrant=use_reentrant)


def differences(mesh: object) -> list[float]:
    """By way of calling, the largest difference from plain torch; each module is compiled within the checkpoint."""
    expected = gradients(model(), lambda of, x: of(x.exp()).cos())
    ways: list[Callable[[nn.Module, Tensor], Tensor]] = [
        lambda of, x: in_checkpoint(of, x, use_reentrant=False),
        lambda of, x: in_checkpoint(of, x, use_reentrant=True),
        _with_saved_on_cpu,
    ]
    found = [gradients(shardc.parallelize(model(), mesh, PLAN), way) for way in ways]
    return [max(float((a - b).abs().max()) for a, b in zip(each, expected, strict=True)) for each in found]


def _with_saved_on_cpu(of: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return of(x.exp()).cos()


def test_gradients_are_those_without_a_checkpoint() -> None:
    assert max(differences(shardc.Mesh(dp=2))) < 1e-12


def on_ranks() -> list[float]:
    return differences(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


def test_gradients_on_gloo_ranks_are_those_without_a_checkpoint(gloo: GlooPool) -> None:
    assert max(max(each) for each in gloo.run(on_ranks)) < 1e-12


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_numbers_that_would_be_drawn_twice_are_refused(use_reentrant: bool) -> None:
    parallel = shardc.parallelize(model(dropout=0.5), shardc.Mesh(dp=2), PLAN, seed=1)
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    loss = in_checkpoint(parallel, x, use_reentrant).sum()
    with pytest.raises(OrderError, match=r"a checkpoint around it calls it again in backward\n.*differ.*\n.*remat="):
        loss.backward()
    parallel.eval()
    in_checkpoint(parallel, x, use_reentrant).sum().backward()
    assert x.grad is not None and bool(x.grad.any())


class AlwaysDropout(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(input.exp(), 0.5, training=True)


def test_numbers_that_evaluation_would_draw_twice_are_refused() -> None:
    """A call in training, or another seed, changes them between."""
    parallel = shardc.parallelize(AlwaysDropout(), shardc.Mesh(dp=2), {"input:input": P("dp")}, seed=1).eval()
    loss = in_checkpoint(parallel, torch.ones(4, 6, requires_grad=True), use_reentrant=False).sum()
    with pytest.raises(OrderError, match="calls it again in backward"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_numbers_that_are_drawn_once_are_not_refused(use_reentrant: bool) -> None:
    """In a hook that runs while a checkpoint computes again, and in a checkpoint that begins in backward."""
    parallel = shardc.parallelize(model(dropout=0.5), shardc.Mesh(dp=2), PLAN, seed=1)
    x, seen = torch.ones(4, 6, dtype=torch.float64, requires_grad=True), list[Tensor]()

    def hooked(x: Tensor) -> Tensor:
        y = x.exp()
        if y.requires_grad:
            y.register_hook(lambda gradient: seen.append(checkpoint(parallel, gradient, use_reentrant=use_reentrant)))
        return y.cos()

    checkpoint(hooked, x, use_reentrant=use_reentrant).sum().backward()
    assert len(seen) == 1 and bool(seen[0].any())


def test_a_program_compiled_in_backward_is_that_of_a_usual_call() -> None:
    plan = {"zero": shardc.Zero("dp", 3), "remat": shardc.Remat("2")}
    layers = nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 50), nn.Tanh(), nn.Linear(50, 6)).double()
    usual, within = (shardc.parallelize(layers, shardc.Mesh(dp=2), {"input:input": P("dp")}, **plan) for _ in range(2))
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    usual(x).sum().backward()
    in_checkpoint(within, x, use_reentrant=True).sum().backward()
    assert within.program.memory == usual.program.memory


def test_a_call_is_compiled_within_a_selective_checkpoint() -> None:
    chosen = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def call(of: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: of(x.exp()).cos(), x, use_reentrant=False, context_fn=chosen)

    expected = gradients(model(), call)
    found = gradients(shardc.parallelize(model(), shardc.Mesh(dp=2), PLAN), call)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
