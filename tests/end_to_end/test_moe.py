"""A mixture of experts by annotation: collectives of a layer on 1-D, 2-D and 3-D meshes; values of one device."""

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


class OneGroup(moe.MoE):
    """Experts that give places to the tokens of all sequences together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1).unsqueeze(0)).view_as(x)


@pytest.mark.parametrize("plan", ["experts", "experts beside data"])
def test_places_among_all_tokens_take_the_totals_of_ranks_and_the_same_tokens_are_dropped(plan: str) -> None:
    """The dispatch is then a sum over tokens, each rank's being a part: reduce_scatter there, all_gather back."""
    mesh, annotations = PLANS[plan]
    torch.manual_seed(0)
    model = moe.Model(1, capacity_factor=0.6)
    model.layers[0] = OneGroup(32, 128, 8, 0.6)
    x, target = torch.randn(2, 8, 16, 32, dtype=torch.float64)
    found = shardc.compile(model.double(), mesh, annotations, args=(x, target))
    totals = [each for each in found.collectives if each.dtype == "int64"]
    assert len(totals) == 3 and all(each.bytes <= 8 * mesh.size * 8 for each in totals)
    along = Counter((each.kind, each.phase) for each in found.collectives if each.axes == ("ep",) and each.bytes > 4096)
    both = [(kind, phase) for kind in ("reduce_scatter", "all_gather") for phase in ("forward", "backward")]
    assert along == dict.fromkeys(both, 1)
    equals_one_device(found, x, target)


class Dense(torch.nn.Module):
    """A layer of two linear ones beside one of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.moe = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32), moe.Model(1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.moe(x + self.down(self.up(x).relu()), target)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_beside_tensor_parallel_beside_experts(stage: int) -> None:
    torch.manual_seed(0)
    mesh, model = Mesh(dp=2, tp=2, ep=2), Dense().double()
    annotations = {"x": P(("dp", "ep")), "moe.layers.*.up": P("ep", None, "tp"), "down.weight": P(None, "tp")}
    x, target = torch.randn(2, 8, 16, 32, dtype=torch.float64)
    found = shardc.compile(model, mesh, annotations, args=(x, target), zero=shardc.Zero("dp", stage))
    counts = Counter((each.kind, each.phase) for each in found.collectives if "dp" not in each.axes and each.bytes > 8)
    assert counts["all_to_all", "forward"] == counts["all_to_all", "backward"] == 2
    assert {str(found.shardings[f"moe.layers.0.{name}"]) for name in ("up", "down")} == {
        "[_@ep, _@dp, _@tp]",
        "[_@ep, _@tp, _@dp]",
    }
    along = {(each.kind, each.phase) for each in found.collectives if each.axes == ("dp",) and each.bytes > 8}
    gathers = {("all_gather", phase) for phase in (["update"] if stage == 1 else ["forward", "backward"])}
    assert along == gathers | {("reduce_scatter", "backward")}
    equals_one_device(found, x, target)
