"""Every random op draws the same numbers on every mesh, of the distribution that it names."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import shardc
from shardc import Mesh, P
from shardc.capture.decompositions import FunctionRewrites
from shardc.capture.values.masks import Masks
from shardc.capture.values.refusals import Guards
from shardc.ops.attention.rules import is_attention
from shardc.ops.attention.tiled import TILED, TILED_BACKWARD
from shardc.ops.random import poisson_quantile, seeded

pytestmark = pytest.mark.xdist_group("draw_random")  # who shares what is made once
Moments = tuple[float, float]
Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, tuple[Draw, Moments]] = {
    "rand_like": (torch.rand_like, (0.5, 1 / 12)),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), (0.5, 1 / 12)),
    "rand of bfloat16": (lambda x: torch.rand(x.shape, dtype=torch.bfloat16).to(x.dtype), (0.5 - 2**-9, 1 / 12)),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), (1.0, 16 / 12)),
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), (0.0, 1.0)),
    "randn of bfloat16": (lambda x: torch.randn(x.shape, dtype=torch.bfloat16).to(x.dtype), (0.0, 1.0)),
    "randn of complex": (lambda x: torch.randn(x.shape, dtype=torch.complex64).abs().square().to(x.dtype), (1.0, 1.0)),
    "randn_like": (torch.randn_like, (0.0, 1.0)),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), (2.0, 9.0)),
    "normal of tensors": (lambda x: torch.normal(x * 0 + 1, 2.0), (1.0, 4.0)),
    "normal of two tensors": (lambda x: torch.normal(x * 0 + 1, x * 0 + 3), (1.0, 9.0)),
    "log_normal_": (
        lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
        (math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    ),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), (0.5, 0.25)),
    "arc tangent of cauchy_": (
        lambda x: torch.empty_like(x).cauchy_(1, 2).sub(1).div(2).atan(),
        (0.0, math.pi**2 / 12),
    ),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.4), (2.5, 0.6 / 0.16)),
    "bernoulli of tensors": (lambda x: torch.bernoulli(x * 0 + 0.25), (0.25, 0.1875)),
    "bernoulli_ of a tensor": (lambda x: torch.empty_like(x).bernoulli_(x * 0 + 0.25), (0.25, 0.1875)),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), (0.25, 0.1875)),
    "randint": (lambda x: torch.randint(2, 12, x.shape).to(x.dtype), (6.5, 99 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 10), (4.5, 99 / 12)),
    "random_": (lambda x: torch.empty_like(x, dtype=torch.int64).random_().to(x.dtype) / 2**63, (0.5, 1 / 12)),
    "random_ to": (lambda x: torch.empty_like(x).random_(3, 13), (7.5, 99 / 12)),
    "low bits of random_": (
        lambda x: torch.empty_like(x, dtype=torch.int64).random_().remainder(16).to(x.dtype),
        (7.5, 255 / 12),
    ),
    "poisson": (lambda x: torch.poisson(x + 3.5), (3.5, 3.5)),
    "binomial": (lambda x: torch.binomial(x * 0 + 10, x * 0 + 0.3), (3.0, 2.1)),
    "gamma": (lambda x: torch._standard_gamma(x * 0 + 2.5), (2.5, 2.5)),
    "dirichlet": (lambda x: torch._sample_dirichlet(x * 0 + 1).mul(x.shape[-1]), (1.0, 95 / 97)),
    "multinomial": (
        lambda x: torch.multinomial(x[:, :4] + torch.tensor([0.1, 0.2, 0.0, 0.7]), 96, True).to(x.dtype),
        (2.3, 6.5 - 2.3**2),
    ),
    "multinomial without replacement": (
        lambda x: torch.multinomial(x + 1.0, 96).to(x.dtype),
        (47.5, (96**2 - 1) / 12),
    ),
    "randperm": (lambda x: torch.randperm(x.numel()).view(x.shape).to(x.dtype) / x.numel(), (0.5, 1 / 12)),
    "dropout": (lambda x: F.dropout(x + 1, 0.2), (1.0, 0.25)),
    "rrelu": (lambda x: F.rrelu(x - 1, 0.2, 0.6, training=True), (-0.4, 0.16 / 12)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), (0.0, 0.6071)),
    "feature_dropout": (lambda x: F.dropout2d((x + 1)[..., None], 0.5)[..., 0], (1.0, 1.0)),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x[..., None].expand(*x.shape, 2), hard=True)[..., 0], (0.5, 0.25)),
}


class Model(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.draw(x), self.draw(x)


@cache
def compiled(name: str, mesh: Mesh, spec: P) -> shardc.Compiled:
    x = torch.zeros(64, 96, dtype=torch.float64)
    return shardc.compile(Model(DRAWS[name][0]), mesh, {"x": spec, "output:*": spec}, args=(x,), train=False)


def drawn(name: str, mesh: Mesh, spec: P, step: int = 0) -> tuple[Tensor, Tensor]:
    outputs, _ = compiled(name, mesh, spec).simulate(torch.zeros(64, 96, dtype=torch.float64), seed=5, step=step)
    return outputs  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_the_same_on_every_mesh_and_another_at_each_place_and_step(name: str) -> None:
    whole, second = drawn(name, Mesh(a=1), P())
    assert not torch.equal(whole, second), "two draws of one module"
    assert not torch.equal(whole, drawn(name, Mesh(a=1), P(), step=1)[0]), "two steps"
    for mesh, spec in ((Mesh(a=3, b=2), P("a", "b")), (Mesh(a=5), P(None, "a"))):
        assert torch.equal(whole, drawn(name, mesh, spec)[0]), f"{mesh}, {spec}"


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_the_mean_and_the_variance_of_its_distribution(name: str) -> None:
    mean, variance = DRAWS[name][1]
    found, _ = drawn(name, Mesh(a=2), P("a"))
    error = (variance / found.numel()) ** 0.5
    assert abs(found.mean().item() - mean) < 5 * error
    assert abs(found.var().item() / variance - 1) < 0.15


WHOLE = {"binomial", "gamma", "dirichlet"}


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_ops_that_draw_whole_tensors_are_reported_and_no_others(name: str) -> None:
    program = compiled(name, Mesh(a=2), P("a")).at("propagate")
    fallbacks = {node.target for node in program.calls if program.rule(node).is_fallback}
    assert fallbacks == ({seeded} if name in WHOLE else set())


def test_a_permutation_holds_every_number_once() -> None:
    found, _ = drawn("randperm", Mesh(a=2), P("a"))
    assert torch.equal((found * found.numel()).flatten().sort().values, torch.arange(64.0 * 96, dtype=torch.float64))


def test_indices_drawn_without_replacement_differ_and_those_of_no_chance_come_never() -> None:
    found, _ = drawn("multinomial without replacement", Mesh(a=2), P("a"))
    assert torch.equal(found.sort().values, torch.arange(96.0, dtype=torch.float64).expand(64, 96))
    assert not (drawn("multinomial", Mesh(a=2), P("a"))[0] == 2).any()


@pytest.mark.parametrize("rate", [0.0, 0.3, 4.0, 170.0, 1e5, 1e12])
def test_poisson_quantiles_invert_the_distribution(rate: float) -> None:
    chance = torch.tensor([0.0, 1e-12, 0.01, 0.3, 0.5, 0.99, 1 - 2**-30, 1 - 2**-48], dtype=torch.float64)
    rates = torch.full_like(chance, rate)
    found = poisson_quantile(rates, chance)
    assert (torch.special.gammaincc(found + 1, rates) >= chance).all()
    below = torch.where(found > 0, torch.special.gammaincc(found.clamp_min(1), rates), -1)
    assert (below < chance)[1:].all()


def test_a_low_precision_draw_is_finite_and_below_one() -> None:
    class Low(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            empty = torch.empty_like(x)
            return torch.rand_like(x), torch.randn_like(x), empty.exponential_().log(), empty.cauchy_()

    for dtype in (torch.bfloat16, torch.float16):
        x = torch.zeros(512, 1024, dtype=dtype)
        (uniform, *others), _ = shardc.compile(Low(), Mesh(a=2), {"x": P("a")}, args=(x,), train=False).simulate(x)
        assert uniform.max() < 1 and all(other.isfinite().all() for other in others[:2]), dtype


def test_a_random_op_of_the_users_own_is_drawn_whole_the_same_on_every_mesh() -> None:
    noise = torch.library.custom_op(
        "draws::noise", lambda x: x + torch.rand_like(x), mutates_args=(), schema="(Tensor x) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded,),
    )  # fmt: skip
    noise.register_fake(torch.empty_like)
    x = torch.zeros(6, 4)
    found = [
        shardc.compile(Model(noise), mesh, {"x": spec}, args=(x,), train=False).simulate(x)[0]
        for mesh, spec in ((Mesh(a=1), P()), (Mesh(a=2), P("a")), (Mesh(a=2, b=2), P("a", "b")))
    ]
    assert not torch.equal(*found[0])
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and torch.equal(found[0][1], other[1])


def test_attention_with_a_dropout_is_an_op_of_our_own_that_draws_by_the_counter() -> None:
    class Attention(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.dropout = dropout

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, None, self.dropout).sum()

    x = torch.randn(2, 2, 8, 4, requires_grad=True)
    for dropout in (0.5, 0.0):
        compiled = shardc.compile(Attention(dropout), Mesh(a=2), {"x": P("a")}, args=(x,))
        targets = [node.target for node in compiled.at("canonicalize").calls if is_attention(node.target)]
        assert len(targets) == 2 and (set(targets) == {TILED, TILED_BACKWARD}) == (dropout > 0)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention, (
        "what FunctionRewrites looks for"
    )


def test_attention_with_a_dropout_that_is_no_one_op_is_captured_by_no_kernel_that_draws_by_itself() -> None:
    def attend(x: Tensor, dropout: float) -> bool:
        """Whether kernels that draw are allowed; keys have one head, and values two."""
        seen: list[bool] = []

        class Look(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is F.scaled_dot_product_attention:
                    seen.append(torch.backends.cuda.flash_sdp_enabled())
                return func(*args, **(kwargs or {}))

        with Look(), FunctionRewrites(Masks(Guards([]), by_index=False)):
            F.scaled_dot_product_attention(x, x[:, :1], x, None, dropout)
        return seen[0]

    x = torch.randn(2, 2, 8, 4)
    assert not attend(x, 0.1) and attend(x, 0.0)
    assert torch.backends.cuda.flash_sdp_enabled()
