"""Parameters that ZeRO stores beside a gathered copy stay what the optimizer has made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Mesh, P, Zero

SIZES = {"even": (64, 128, 64), "uneven in all dims": (13, 75, 37)}
WIRES: dict[str, dict[str, str | None] | None] = {
    "values": None, "bf16": {"dp": "bf16"}, "int4 parameters": {"dp parameters": "int4"},
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", SIZES)
def test_a_forward_changes_no_parameter_and_steps_are_those_of_virtual_ranks(
    gloo: GlooPool, size: str, wire: str, stage: int
) -> None:
    _, expected = _trained(Mesh(dp=2, tp=2), size, wire, stage)
    for changed, found in gloo.run(_train, size, wire, stage):
        assert changed == []
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def _train(size: str, wire: str, stage: int) -> tuple[list[str], dict[str, Tensor]]:
    return _trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), size, wire, stage)


def _trained(mesh: Any, size: str, wire: str, stage: Any) -> tuple[list[str], dict[str, Tensor]]:
    """The parameters that a forward has changed, and all of them after three steps."""
    torch.manual_seed(0)
    first, inner, last = SIZES[size]
    model = nn.Sequential(nn.Linear(first, inner), nn.Tanh(), nn.Linear(inner, last)).double()
    annotations, x = {"input": P("dp"), "0.weight": P("tp"), "2.weight": P(None, "tp")}, torch.randn(8, first).double()
    parallel = shardc.parallelize(model, mesh, annotations, zero=Zero("dp", stage), wire=WIRES[wire])
    with torch.no_grad():
        parallel(x)
    given = dict(model.named_parameters())
    changed = [name for name, value in parallel.named_parameters() if not torch.equal(whole(value), given[name])]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()
    return changed, {name: whole(value).detach().clone() for name, value in parallel.named_parameters()}
