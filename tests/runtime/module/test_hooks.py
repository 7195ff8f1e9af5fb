"""Hooks of the user's model: those of parameters are kept, those of modules captured, or said to be idle."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import MLP, batch, whole
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Zero
from shardc.runtime.comm.distributed import make_device_mesh

PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"x": P("dp"), "y": P("dp")}, {}),
    ({"x": P("dp"), "y": P("dp")}, {"zero": Zero("dp", stage=3)}),
]


def hooked() -> tuple[MLP, list[str], list[Any]]:
    """A model whose gradients are scaled and clamped by hooks, and what a hook has seen; the handles of both."""
    torch.manual_seed(0)
    model, seen = MLP(), list[str]()
    handles: list[Any] = [
        model.up.weight.register_hook(lambda gradient: 3 * gradient),
        model.down.bias.register_post_accumulate_grad_hook(lambda each: seen.append(str(each.grad is not None))),
    ]
    return model, seen, handles


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        for part in range(2):
            loss = model(*batch(2 * step + part))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run_hooked(plan: int) -> tuple[float, float, int]:
    annotations, options = PLANS[plan]
    model, seen, _ = hooked()
    parallel, alone = shardc.parallelize(model, make_device_mesh(Mesh(dp=4)), annotations, **options), model
    runs = [train(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (parallel, alone)]
    differences = [abs(one - other) for one, other in zip(*runs, strict=True)]
    pairs = zip(parallel.parameters(), alone.parameters(), strict=True)
    return max(differences), max((whole(a.detach()) - b.detach()).abs().max().item() for a, b in pairs), len(seen)


@pytest.mark.parametrize("plan", [0, 1], ids=["data", "zero 3"])
def test_hooks_of_parameters_are_kept_on_ranks(gloo: GlooPool, plan: int) -> None:
    for losses, parameters, count in gloo.run(run_hooked, plan):
        assert losses < 1e-6 and parameters < 1e-6 and count == 12


def test_a_hook_of_a_parallel_parameter_stays_when_it_is_cut_and_can_be_removed() -> None:
    model, _, _ = hooked()
    parallel = shardc.parallelize(model, Mesh(dp=2), {"x": P("dp")})
    handle = parallel.up.weight.register_hook(lambda gradient: 5 * gradient)
    gradients = []
    for _ in range(2):
        parallel(*batch(0)).backward()
        gradients.append(parallel.up.weight.grad)
        parallel.zero_grad()
        handle.remove()
    torch.testing.assert_close(gradients[0], 5 * gradients[1])
    plain = copy.deepcopy(model)
    plain(*batch(0)).backward()  # a copy of torch's has no hooks
    torch.testing.assert_close(gradients[1], 3 * plain.up.weight.grad)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def look(module: nn.Module, *values: Any) -> None:
    """Look at what passes, and change nothing."""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_that_change_values_are_captured_without_a_warning() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 8)
    model.two.register_forward_hook(double)
    model.one.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.two.register_full_backward_hook(lambda module, inputs, outputs: tuple(3 * each for each in inputs))
    parallel = shardc.parallelize(model, Mesh(dp=2), {"x": P("dp")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, expected = parallel(x), model(x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_hooks_that_only_look_are_named_in_one_warning() -> None:
    model = MLP()
    model.register_forward_hook(look)
    model.up.register_forward_hook(look)
    model.down.register_full_backward_hook(look)
    model.down.register_forward_hook(double)
    parallel = shardc.parallelize(model, Mesh(dp=2), {"x": P("dp")})
    with pytest.warns(UserWarning) as caught:
        parallel(*batch(0))
    assert [str(each.message).splitlines() for each in caught] == [[
        "hooks of MLP: those of up, (model), down return nothing",
        "  they run while the model is captured, and in no step after",
        "  return what they look at as an output, or set a hook on the module that parallelize returns",
    ]]  # fmt: skip


def test_a_hook_that_is_set_after_parallelize_is_captured_by_the_next_call() -> None:
    model, seen = MLP(), list[Any]()
    parallel = shardc.parallelize(model, Mesh(dp=2), {"x": P("dp")})
    before = parallel(*batch(0))
    parallel.down.register_forward_hook(lambda module, args, output: output + 1)
    parallel.register_forward_hook(lambda module, args, output: seen.append(output))
    after = parallel(*batch(0))
    model.down.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(after, model(*batch(0)))
    assert before != after and seen == [after]
