"""Programs store no strides: an op that depends on them is given what it needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P


class Scaled(nn.Module):
    def __init__(self, function: Callable[[Scaled, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


MODELS: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "the gradient of pairs, which is expanded": lambda self, x: torch.view_as_real(x * self.scale * 1j).sum(),
    "pairs between others": lambda self, x: torch.view_as_complex((x * self.scale)[:, 1:3].contiguous()).abs().sum(),
    "a piece of a gathered bucket": lambda self, x: (x * self.scale).put(torch.tensor([1, 2]), self.scale[:2]).sum(),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_op_that_depends_on_strides_equals_one_device(name: str) -> None:
    model, x = Scaled(MODELS[name]), torch.randn(5, 6, dtype=torch.float64)
    compiled = shardc.compile(model, Mesh(dp=2, tp=2), {"x": P("dp", "tp"), "scale": P("tp")}, args=(x,))
    found, gradients = compiled.simulate(x)
    loss = model(x)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradients["scale"], torch.autograd.grad(loss, model.scale)[0])
