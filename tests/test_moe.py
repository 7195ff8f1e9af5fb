"""A mixture of experts by annotation: what a layer sends on 1-D, 2-D and 3-D meshes, and that it equals one device."""

from __future__ import annotations

from collections import Counter

import moe
import pytest
import torch
from one_device import equals_one_device

import shardc
from shardc import Mesh, P

LAYERS = 2
PLANS = {
    "experts": (Mesh(ep=4), {"x": P("ep"), "layers.*.up": P("ep")}),
    "experts beside data": (Mesh(dp=2, ep=4), {"x": P(("dp", "ep")), "layers.*.up": P("ep")}),
    "experts over the data's axis": (Mesh(dp=4, tp=2), {"x": P("dp"), "layers.*.up": P("dp", None, "tp")}),
    "three axes": (Mesh(dp=2, ep=2, tp=2), {"x": P(("dp", "ep")), "layers.*.up": P("ep", None, "tp")}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_layer_sends_tokens_to_their_experts_and_back_twice_and_equals_one_device(plan: str) -> None:
    mesh, annotations = PLANS[plan]
    torch.manual_seed(0)
    model = moe.Model(LAYERS, capacity_factor=0.6).double()
    x, target = torch.randn(2, 8, 16, 32, dtype=torch.float64)
    found = shardc.compile(model, mesh, annotations, args=(x, target))
    counts = Counter((each.kind, each.phase) for each in found.collectives if each.kind != "all_reduce")
    assert counts == {("all_to_all", "forward"): 2 * LAYERS, ("all_to_all", "backward"): 2 * LAYERS}
    equals_one_device(found, x, target)


def test_tokens_are_dropped_where_experts_are_full() -> None:
    """So that equal values say that the same ones are."""
    torch.manual_seed(0)
    gates = torch.randn(8, 16, 8).softmax(-1)
    taken = (moe.top2(gates, capacity=2) > 0).sum((2, 3))
    assert {0, 1, 2} == set(taken.flatten().tolist())
    assert torch.equal(moe.top2(gates, capacity=16).sum((2, 3)).round(decimals=5), torch.ones(8, 16))


def test_experts_stay_where_they_are_when_few_tokens_would_move_and_are_gathered_when_many_would() -> None:
    mesh, annotations = PLANS["experts"]
    model = moe.Model(layers=1, width=8)
    kinds = []
    for tokens in (16, 2048):
        x = torch.empty(8, tokens, 8, device="meta")
        found = shardc.compile(model, mesh, annotations, args=(x, x))
        kinds.append({each.kind for each in found.collectives if each.phase == "forward"})
    assert kinds == [{"all_to_all", "all_reduce"}, {"all_gather", "all_reduce"}]
