"""Codes with feedback: what they leave out of gradients is kept, added in the next step, saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardc import Mesh, P, Zero, compile
from shardc.program.coding.nodes import left_out
from shardc.runtime.simulator import simulate

CODECS = ("1bit", "topk:0.02")


class Net(nn.Module):
    """Two linear layers over 60 features, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(60, 90), nn.Linear(90, 60), nn.Linear(60, 35, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(x + self.down(torch.relu(self.up(x)))), y)


def net(dtype: torch.dtype = torch.float64) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Net().to(dtype), (torch.randn(24, 60, dtype=dtype), torch.randint(35, (24,)))


DATA, TENSOR = {"x": P("dp"), "y": P("dp")}, {"up.weight": P("tp"), "down.weight": P(None, "tp"), "head.weight": P("tp")}
BOTH = {"x": P(("node", "dp")), "y": P(("node", "dp"))}
PLANS: dict[str, tuple[Mesh, dict[str, P], dict[str, Any], tuple[str, ...]]] = {
    "data": (Mesh(dp=4), DATA, {}, ("dp",)),
    "data, uneven": (Mesh(dp=5), DATA, {"bucket": 4000}, ("dp",)),
    "data and tensor": (Mesh(dp=2, tp=3), DATA | TENSOR, {}, ("dp",)),
    "two axes of data": (Mesh(node=2, dp=2), BOTH, {}, ("node", "dp")),
    "two axes of data, one coded": (Mesh(node=2, dp=3), BOTH, {}, ("node",)),
    "two axes of data, the other coded": (Mesh(node=2, dp=3), BOTH, {}, ("dp",)),
    "stage 1": (Mesh(dp=3), DATA, {"zero": Zero("dp", 1)}, ("dp",)),
    "stage 2": (Mesh(dp=4, tp=2), DATA | TENSOR, {"zero": Zero("dp", 2), "bucket": 4000}, ("dp",)),
    "stage 3": (Mesh(dp=7), DATA, {"zero": Zero("dp", 3)}, ("dp",)),
    "stage 3 of two axes": (Mesh(node=2, dp=2), BOTH, {"zero": Zero(("node", "dp"), 3)}, ("node", "dp")),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_and_what_is_left_out_are_the_whole_gradient(name: str, codec: str) -> None:
    """Of a gradient and what was left out before, each rank's own, nothing is lost and nothing comes twice."""
    mesh, annotations, options, axes = PLANS[name]
    model, call = net()
    wire = dict.fromkeys(axes, codec)
    compiled = compile(model, mesh, annotations, args=call, wire=wire, **options)
    assert any(node.target is left_out for node in compiled.whole.calls)
    program, generator = compiled.program, torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(value.shape, generator=generator, dtype=value.dtype) / 100 if put.kind == "residual" else value
        for put, value in zip(program.inputs, compiled.inputs(program, call), strict=True)
    ]
    before = {put.name: value for put, value in zip(program.inputs, inputs, strict=True) if put.kind == "residual"}
    results = {
        (output.kind, output.name): value
        for output, value in zip(program.outputs, simulate(program, inputs), strict=True)
    }
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(model(*call), [*model.parameters()])))
    assert before.keys() >= {"up.weight", "down.weight", "head.weight"}
    for path, gradient in gradients.items():
        found = results["gradient", path]
        assert found is not None
        if path in before:
            left = results["residual", path]
            assert left is not None and left.shape == before[path].shape
            assert not torch.allclose(found, gradient, rtol=0.1)
            found, gradient = found + left.sum(0), gradient + before[path].sum(0)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-8, msg=path)
