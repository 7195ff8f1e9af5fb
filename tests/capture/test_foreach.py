"""Ops over lists of tensors stay cut, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.program.traffic import fallbacks_of

Tensors = list[Tensor]
STEPS: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "with a list": lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.5),
    "with numbers": lambda xs, ys: torch._foreach_mul(xs, [2.0, 3.0]),
    "with one tensor": lambda xs, ys: torch._foreach_div(xs, ys[0].square().sum() + 1),
    "ternary": lambda xs, ys: torch._foreach_addcmul(xs, xs, ys, 0.3),
    "ternary, numbers in a tensor": lambda xs, ys: torch._foreach_addcdiv(
        xs, xs, [y.exp() for y in ys], torch.tensor([0.5, 2.0])
    ),
    "of a number": lambda xs, ys: torch._foreach_pow(2.0, ys),
    "greater": lambda xs, ys: torch._foreach_maximum(xs, 0.1),
    "norms": lambda xs, ys: torch._foreach_norm(xs, 2),
    "in place": lambda xs, ys: (torch._foreach_lerp_(copies := [x.clone() for x in xs], ys, 0.9), copies)[1],
}


class Model(nn.Module):
    def __init__(self, step: Callable[[Tensors, Tensors], Tensors]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([found.reshape(-1) for found in self.step([x, x.mT], [y, y.mT])])


@pytest.mark.parametrize("name", STEPS)
def test_a_list_is_computed_tensor_by_tensor(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64, generator=generator)
    model = Model(STEPS[name])
    compiled = shardc.compile(model, Mesh(a=2, b=2), {"x": P("a", "b")}, args=(x, y), train=False)
    torch.testing.assert_close(compiled.simulate(x, y)[0], model(x, y), rtol=0, atol=1e-12)
    assert not fallbacks_of(compiled.at("propagate"))
