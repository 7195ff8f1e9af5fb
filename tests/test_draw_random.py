"""Every random op draws the same numbers on every mesh, of the distribution that it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardc
from shardc import Mesh, P

Moments = tuple[float, float]

DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], Moments]] = {
    "rand_like": (torch.rand_like, (0.5, 1 / 12)),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), (0.5, 1 / 12)),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), (1.0, 16 / 12)),
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), (0.0, 1.0)),
    "randn_like": (torch.randn_like, (0.0, 1.0)),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), (2.0, 9.0)),
    "normal of tensors": (lambda x: torch.normal(x * 0 + 1, 2.0), (1.0, 4.0)),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), (0.5, 0.25)),
    "bernoulli of tensors": (lambda x: torch.bernoulli(x * 0 + 0.25), (0.25, 0.1875)),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), (0.25, 0.1875)),
    "randint": (lambda x: torch.randint(2, 12, x.shape).to(x.dtype), (6.5, 99 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 10), (4.5, 99 / 12)),
}


class Model(torch.nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.draw(x), self.draw(x)


def drawn(name: str, mesh: Mesh, spec: P, step: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.zeros(64, 96, dtype=torch.float64)
    compiled = shardc.compile(Model(DRAWS[name][0]), mesh, {"x": spec, "output:*": spec}, args=(x,), train=False)
    outputs, _ = compiled.simulate(x, seed=5, step=step)
    return outputs  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_the_same_on_every_mesh_and_another_at_each_place_and_step(name: str) -> None:
    whole, second = drawn(name, Mesh(a=1), P())
    assert not torch.equal(whole, second), "two draws of one module"
    assert not torch.equal(whole, drawn(name, Mesh(a=1), P(), step=1)[0]), "two steps"
    for mesh, spec in ((Mesh(a=2), P("a")), (Mesh(a=2, b=3), P("a", "b")), (Mesh(a=4), P(None, "a"))):
        assert torch.equal(whole, drawn(name, mesh, spec)[0]), f"{mesh}, {spec}"


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_the_mean_and_the_variance_of_its_distribution(name: str) -> None:
    mean, variance = DRAWS[name][1]
    found, _ = drawn(name, Mesh(a=2), P("a"))
    error = (variance / found.numel()) ** 0.5
    assert abs(found.mean().item() - mean) < 5 * error
    assert abs(found.var().item() / variance - 1) < 0.15


def test_a_random_op_without_such_a_form_is_refused_by_its_line() -> None:
    with pytest.raises(
        NotImplementedError, match=r"aten.randperm.default .* \(test_draw_random.py:\d+\): this random op"
    ):
        shardc.compile(Model(lambda x: torch.randperm(8)), Mesh(a=2), {}, args=(torch.zeros(2),), train=False)
