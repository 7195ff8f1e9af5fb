"""Groups that train by themselves equal copies of the model that do, with outer steps of the same optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Local, P, Pipeline, Zero

STEPS, BATCH = 13, 8
INNER = {"lr": 0.02, "weight_decay": 0.1}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
LAYERS = {"up.weight": P("tp"), "down.weight": P(None, "tp")}
PLANS: dict[str, Any] = {
    "groups of one": ({"dc": 4}, {"x": P("dc")}, {}),
    "data": ({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, {}),
    "tensor, axes in another order": ({"tp": 2, "dc": 2}, {"x": P("dc"), **LAYERS}, {}),
    "stored": ({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, {"zero": Zero("dp", 3)}),
    "stages": (
        {"dc": 2, "pp": 2}, {"x": P("dc")},
        {"pipeline": Pipeline("pp", microbatches=2)},
    ),
}  # fmt: skip


class Net(nn.Module):
    """Two layers, of sizes that no mesh divides, and a layer that is trained late."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def expected(groups: int, every: int, parts: int = 1, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """The parameters of each group, of copies of the model that are trained in plain torch."""
    models = [net() for _ in range(groups)]
    inner = [torch.optim.AdamW(model.parameters(), **INNER) for model in models]
    anchors = [each.detach().clone() for each in models[0].parameters()]
    outers = [torch.optim.SGD([anchor], **OUTER) for anchor in anchors]
    total, before, parts_of = sum(each.numel() for each in anchors), 0, []
    for anchor in anchors:
        parts_of.append(before * parts // total)
        before += anchor.numel()
    for step, batch in enumerate(batches()[:steps], 1):
        for model, optimizer, own in zip(models, inner, batch.chunk(groups), strict=True):
            optimizer.zero_grad()
            model(own).backward()
            optimizer.step()
        for i, (anchor, outer, part) in enumerate(zip(anchors, outers, parts_of, strict=True)):
            first = every * (part + 1) // parts
            if step >= first and (step - first) % every == 0:
                values = [list(model.parameters())[i] for model in models]
                anchor.grad = torch.stack([anchor - value.detach() for value in values]).mean(0)
                outer.step()
                for value in values:
                    value.data.copy_(anchor)
    return [{name: each.detach() for name, each in model.named_parameters()} for model in models]


def train(sizes: dict[str, int], annotations: Any, options: Any, local: Local, steps: int = STEPS) -> dict[str, Any]:
    """The parameters of this rank's group, and the bytes that this rank has sent to the others."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(mesh.get_rank())  # whose values all start from are the first group's
    model = net() if mesh.get_rank() == 0 else Net().double()
    module = shardc.parallelize(model, mesh, annotations, local=local, **options)
    module(batches()[0])
    optimizer = torch.optim.AdamW(module.parameters(), **INNER)
    sent = module.shardc.outer.groups.traffic
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    held = {id(each) for each in module.shardc.parameters()}  # by the stage of this rank
    return {
        "index": module.shardc.outer.groups.index, "sent": sum(sent.bytes.values()),
        "parameters": {name: whole(each) for name, each in module.named_parameters() if id(each) in held},
    }  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("every", "parts"), [(4, 1), (5, 2)])
def test_equals_copies_of_the_model(gloo: GlooPool, name: str, every: int, parts: int) -> None:
    sizes, annotations, options = PLANS[name]
    wanted = expected(sizes["dc"], every, parts)
    for found in gloo.run(train, sizes, annotations, options, Local("dc", every, parts=parts)):
        for key, value in found["parameters"].items():
            torch.testing.assert_close(value, wanted[found["index"]][key], rtol=1e-10, atol=1e-10, msg=key)
