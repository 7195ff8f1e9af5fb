"""Combined plans on eight ranks: twenty steps of training equal those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpt
import moe
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Zero

STEPS = 20
Batch = Callable[[int], tuple[Tensor, ...]]


def gpt_model() -> nn.Module:
    return gpt.GPT(gpt.Config(vocab=52, context=12, layers=2, heads=4, width=16, fused=False))


def gpt_batch(step: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(52, (2, 8, 12), generator=torch.Generator().manual_seed(step)))


def moe_model() -> nn.Module:
    return moe.Model(layers=2, width=16, capacity_factor=0.6)


def moe_batch(step: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(step)).double())


ON_TWO = {"ids": P(("rep", "dp")), "targets": P(("rep", "dp"))}
EXPERTS = {"x": P(("dp", "ep")), "layers.*.up": P("ep", None, "tp")}
PLANS: dict[str, tuple[Callable[[], nn.Module], Batch, Mesh, dict[str, P], dict[str, Any]]] = {
    "stage 3 on one of two data axes, tensor": (
        gpt_model, gpt_batch, Mesh(rep=2, dp=2, tp=2), ON_TWO | gpt.MEGATRON, {"zero": Zero("dp", 3)},
    ),
    "stage 1, tensor, sequence": (
        gpt_model, gpt_batch, Mesh(dp=2, tp=4), gpt.DATA | gpt.MEGATRON | {"module:tokens": P("dp", "tp")},
        {"zero": Zero("dp", 1)},
    ),
    "stage 2, tensor, experts": (moe_model, moe_batch, Mesh(dp=2, ep=2, tp=2), EXPERTS, {"zero": Zero("dp", 2)}),
    "stage 3, tensor, experts": (moe_model, moe_batch, Mesh(dp=2, ep=2, tp=2), EXPERTS, {"zero": Zero("dp", 3)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_twenty_steps_are_those_of_one_device(plan: str) -> None:
    make, batch, mesh, annotations, options = PLANS[plan]
    torch.manual_seed(0)
    alone = make().double()
    parallel = shardc.parallelize(copy.deepcopy(alone), mesh, annotations, **options)
    runs = [(model, torch.optim.AdamW(model.parameters(), lr=0.01)) for model in (alone, parallel)]
    for step in range(STEPS):
        losses = []
        for model, optimizer in runs:
            losses.append(model(*batch(step)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], atol=1e-10, rtol=0)
    for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)
    if "experts" in plan:
        kinds = [each.kind for each in parallel.program.collectives if each.kind == "all_to_all"]
        assert len(kinds) == 2 * (2 + 2), "2 + 2 a layer, beside ZeRO and tensor parallel"
