"""Initial parameters on real ranks: DTensors of shards, with the bits of virtual ranks, that parallelize takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import nn
from torch.distributed.tensor import DTensor

import shardc
from shardc import Mesh, P
from shardc.runtime.comm.distributed import make_device_mesh

MESH = Mesh(dp=2, tp=2)
ANNOTATIONS = {"x": P("dp"), "up.weight": P("tp"), "table.weight": P(("dp", "tp"))}


class Model(nn.Module):
    """A table of 7 rows on 4 ranks; ``down`` is cut by inference alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("scale", torch.arange(6.0) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x) * self.scale
        return (y + self.down(self.up(y).relu())).square().sum()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def initialised_on_ranks(with_inputs: bool) -> dict[str, Any]:
    """The local shapes, the whole values, and the loss and parameters after a step."""
    mesh = make_device_mesh(MESH)
    x = torch.arange(8).view(4, 2) % 7
    given = {"args": (x,)} if with_inputs else {}
    model = shardc.init_parameters(Model, mesh, ANNOTATIONS, seed=5, **given)
    shapes = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    start = {name: value.detach().clone() for name, value in whole(model).items()}
    parallel = shardc.parallelize(model, mesh, ANNOTATIONS)
    losses, final = trained(parallel, x)
    untouched = all(torch.equal(value, start[name]) for name, value in whole(model).items())
    return {"shapes": shapes, "start": start, "losses": losses, "final": final, "untouched": untouched}


def trained(parallel: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        loss = parallel(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {name: value.detach() for name, value in whole(parallel).items()}


@pytest.mark.parametrize("with_inputs", [False, True])
def test_each_rank_makes_its_shard_and_parallelize_takes_it(gloo: GlooPool, with_inputs: bool) -> None:
    found = gloo.run(initialised_on_ranks, with_inputs)
    alone = shardc.init_parameters(Model, Mesh(a=1), seed=5)
    expected_start = {name: value.detach().clone() for name, value in whole(alone).items()}
    x = torch.arange(8).view(4, 2) % 7
    losses, final = trained(shardc.parallelize(alone, Mesh(a=1), {}), x)
    for rank, result in enumerate(found):
        assert result["untouched"]
        assert result["shapes"]["up.weight"] == ((5, 6) if rank % 2 == 0 else (4, 6))
        assert result["shapes"]["table.weight"][0] in (2, 1)
        assert result["shapes"]["down.weight"] == ((6, (5, 4)[rank % 2]) if with_inputs else (6, 9))
        for name, value in expected_start.items():
            assert torch.equal(result["start"][name], value), name
        torch.testing.assert_close(result["losses"], losses)
        for name, value in final.items():
            torch.testing.assert_close(result["final"][name], value)
