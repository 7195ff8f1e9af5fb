"""Sizes need not divide: every value, loss and gradient equals one device, and no op sees padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpt import DATA, GPT, MEGATRON, Config
from one_device import assert_same, assert_same_state
from parallel_models import OPTIMIZERS, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import shardc
from shardc import Mesh, P
from shardc.language.mesh import AxisPart
from shardc.language.sharding import DimSharding, Sharding
from shardc.runtime.comm.distributed import make_device_mesh


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Tensor) -> Tensor:
        return self.function(*xs)


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None and found.shape == expected.shape and found.dtype == expected.dtype
    scale = max(1.0, expected.nan_to_num().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found.detach(), expected, atol=1e-10 * scale, rtol=0, equal_nan=True)


SEEN: dict[str, Callable[..., Tensor]] = {  # what would see padding along dim 0, which is cut
    "sum": lambda x: x.exp().sum(0),
    "mean": lambda x: x.exp().mean(),
    "max": lambda x: (-x.exp()).amax(0),
    "min": lambda x: x.exp().amin(0),
    "softmax": lambda x: (-x).exp().softmax(0),
    "log_softmax": lambda x: x.cos().log_softmax(0),
    "logsumexp": lambda x: x.cos().logsumexp(0),
    "var": lambda x: x.cos().var(0, correction=0),
    "std": lambda x: x.cos().std(),
    "norm": lambda x: x.cos().norm(dim=0),
    "layer_norm": lambda x: F.layer_norm(x.cos().T, x.shape[:1]),
    "argmax": lambda x: (-x.exp()).argmax(0) + x.sum(0),
    "prod": lambda x: x.cos().prod(0),
    "any": lambda x: (x.cos() > 2).any(0) + x.sum(0),
    "all": lambda x: (x.cos() > -2).all(0) + x.sum(0),
    "matmul": lambda x: x.cos().T @ x.cos(),
    "cumsum": lambda x: x.cos().cumsum(0),
    "sort": lambda x: x.cos().sort(0).values,
    "topk": lambda x: x.cos().topk(min(2, x.shape[0]), 0).values,
    "flip": lambda x: x.cos().flip(0),
    "roll": lambda x: x.cos().roll(1, 0),
    "cat": lambda x: torch.cat([x.cos(), x.cos()]),
    "embedding": lambda x: F.embedding((x[:, 0] * 0).long() + 3, x.new_ones(7, 2).cumsum(0)) * x[:, :1],
    "batch_norm": lambda x: F.batch_norm(x.cos().T.reshape(3, 2, -1), None, None, training=True),
    "mse_loss": lambda x: F.mse_loss(x.cos(), x.sin()),
    "huber_loss": lambda x: F.huber_loss(x.cos(), x.sin()),
    "cross_entropy": lambda x: F.cross_entropy(x.cos(), x.new_zeros(x.shape[0]).long()),
    "whole numbers divided": lambda x: (x.new_full(x.shape, 7).long() // (2 + x.sign().long())).sum(0) + x.sum(0),
    "remainder": lambda x: (x.new_full(x.shape, 7).long() % (2 + x.sign().long())).sum(0) + x.sum(0),
    "cholesky": lambda x: torch.linalg.cholesky(x[:, :2, None] * x[:, None, :2] + torch.eye(2, dtype=x.dtype)).sum(0),
    "singular values": lambda x: torch.linalg.svdvals((x[:, :4] / x[:, :4]).view(-1, 2, 2) + x[:, :1, None]).sum(0),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.cos().square()),
}


@pytest.mark.parametrize("rows", [3, 10, *(pytest.param(rows, marks=pytest.mark.sweep) for rows in (1, 5))])
@pytest.mark.parametrize("name", SEEN)
def test_an_op_over_a_dim_that_does_not_divide_sees_no_padding(name: str, rows: int) -> None:
    x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows), requires_grad=True)
    expected = SEEN[name](x)
    weight = torch.rand(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (gradient,) = torch.autograd.grad((expected * weight).sum(), x)
    for mesh, spec in ((Mesh(a=4), P("a")), (Mesh(a=2, b=2), P(("a", "b"))), (Mesh(a=2, b=4), P("a", "b"))):
        model = Apply(lambda x, weight: (SEEN[name](x) * weight).sum())
        compiled = shardc.compile(model, mesh, {"xs.0": spec}, args=(x, weight))
        loss, gradients = compiled.simulate(x, weight)
        close(loss, (expected * weight).sum().detach())
        close(gradients["xs.0"], gradient)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (4, 0), (3, 1)])
def test_dims_of_no_or_one_element_may_be_cut(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[1], 5, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x.cos() @ weight).view(shape[0], 5, 1).exp().sum() + x.flatten().sum()

    expected = function(x, weight)
    gradients = torch.autograd.grad(expected, (x, weight))
    for specs in ({"xs.0": P("a")}, {"xs.0": P(None, "a")}, {"xs.0": P("a", "b"), "xs.1": P(None, "a")}):
        compiled = shardc.compile(Apply(function), Mesh(a=2, b=2), specs, args=(x, weight))
        loss, found = compiled.simulate(x, weight)
        close(loss, expected.detach())
        for i, gradient in enumerate(gradients):
            close(found[f"xs.{i}"], gradient)


OF_NONE: dict[str, Callable[[Tensor], Tensor]] = {  # of a tensor without elements, with gradients
    "cat": lambda x: torch.cat([x.cos(), x], 0).sum() + torch.cat([x.cos(), x], 1).sum(),
    "pad": lambda x: F.pad(x.cos(), (0, 0, 1, 2), value=3.0).sum() + F.pad(x.cos(), (2, 1), value=3.0).sum(),
    "glu": lambda x: F.glu(torch.cat([x, x.cos()]), 0).sum(),
    "mse_loss": lambda x: F.mse_loss(x.cos(), x.sin()),
    "huber_loss": lambda x: F.huber_loss(x.cos(), x.sin()),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x.cos(), x.sin()),
}


@pytest.mark.parametrize("name", OF_NONE)
def test_an_op_of_no_elements_equals_one_device(name: str) -> None:
    for shape in ((0, 4), (4, 0)):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        for spec in (P("a"), P(None, "a")):
            found, gradients = shardc.compile(Apply(OF_NONE[name]), Mesh(a=3), {"xs.0": spec}, args=(x,)).simulate(x)
            close(found, OF_NONE[name](x).detach())
            close(gradients["xs.0"], torch.zeros_like(x))


GPTS = {
    "batch of 5 on 4": (Config(layers=1, width=16), 5, Mesh(dp=4), DATA),
    "vocabulary of 257 on 4": (Config(vocab=257, layers=1, width=16), 3, Mesh(tp=4), {"head.weight": P("tp")}),
    "tied vocabulary of 257 on 4": (
        Config(vocab=257, layers=1, width=16, tied=True), 3, Mesh(tp=4), {"tokens.weight": P("tp")},
    ),
    "three heads on 2": (Config(layers=1, width=24, heads=3), 3, Mesh(dp=2, tp=2), {**DATA, **MEGATRON}),
    "width of 20 on 8": (Config(layers=1, width=20, heads=2), 3, Mesh(dp=2, tp=8), {**DATA, **MEGATRON}),
    "weights over a batch axis of 3": (
        Config(layers=1, width=16), 4, Mesh(dp=3), {**DATA, "param:*weight": P("dp"), "param:*bias": P("dp")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_of_sizes_that_do_not_divide_equals_one_device(name: str) -> None:
    config, batch, mesh, annotations = GPTS[name]
    torch.manual_seed(0)
    model = GPT(config).double()
    ids, targets = (torch.randint(config.vocab, (batch, 7)) for _ in range(2))
    loss = model(ids, targets)
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
    compiled = shardc.compile(model, mesh, annotations, args=(ids, targets))
    found, gradients = compiled.simulate(ids, targets)
    close(found, loss.detach())
    for name, gradient in expected.items():
        close(gradients[name], gradient)


def test_cross_entropy_over_an_uneven_vocabulary_moves_a_few_numbers_a_token() -> None:
    """GPT-2's 50257 tokens, 4 ranks: no collective has the vocabulary in it."""
    model = GPT(Config(vocab=50257, layers=1, width=8))
    ids = torch.zeros(2, 7, dtype=torch.long)
    compiled = shardc.compile(model, Mesh(tp=4), {"head.weight": P("tp")}, args=(ids, ids))
    largest = max(collective.bytes for collective in compiled.collectives)
    assert largest <= 2 * 7 * 8 * 4, compiled.collectives
    assert compiled.shardings["head.weight"].local_shape((50257, 8)) == (12565, 8)


class Net(nn.Module):
    """Sizes 7, 5 and 11: none divides by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 11)
        self.register_buffer("seen", torch.zeros(11))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        if self.training:
            self.seen = self.seen + y.detach().mean(0)
        return y.square().mean(), y


NETS = {
    "tensor parallel": ({"x": P("dp"), "up.weight": P("tp")}, (Replicate(), Shard(0))),
    "over both axes": ({"x": P("dp"), "up.weight": P(("dp", "tp"))}, (Shard(0), Replicate())),
    "over both axes, which torch cuts alike": ({"down.weight": P(("dp", "tp"))}, (Replicate(), Replicate())),
    "a buffer": ({"x": P("dp"), "seen": P("tp"), "up.weight": P(("tp", "dp"))}, (Replicate(), Shard(0))),
}


def run_training(name: str, optimizer: str) -> object:
    annotations, _ = NETS[name]
    torch.manual_seed(0)
    alone = Net().double()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=2, tp=2)), annotations)
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (parallel, alone)]
    for step in range(3):
        x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        outputs = [model(x) for model in (parallel, alone)]
        for one, other in zip(*outputs, strict=True):
            assert_same(one, other)
        for model, (loss, _), each in zip((parallel, alone), outputs, optimizers, strict=True):
            each.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            each.step()
    assert_same_state(parallel, alone)
    for name_, parameter in parallel.named_parameters():
        local = parameter.to_local()
        chunks = torch.distributed.tensor.distribute_tensor(whole(parameter).detach(), parameter.device_mesh,
                                                            parameter.placements).to_local()  # fmt: skip
        assert torch.equal(local, chunks), name_
    assert isinstance(outputs[0][1], DTensor)
    return parallel.up.weight.placements


@pytest.mark.parametrize("optimizer", ["adamw foreach", "sgd"])
@pytest.mark.parametrize("name", NETS)
def test_uneven_dtensors_are_torchs_chunks_and_train_like_one_device(gloo, name: str, optimizer: str) -> None:
    for placements in gloo.run(run_training, name, optimizer):
        assert placements == NETS[name][1]


def test_a_sharding_that_dtensor_cannot_express_is_stored_with_fewer_cuts() -> None:
    mesh = Mesh(dp=2, tp=4)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")

    def stored(size: int, *axes: AxisPart) -> tuple[AxisPart, ...]:
        return Sharding(mesh, (DimSharding(axes),)).storable((size,)).dims[0].axes

    assert stored(8, dp, tp) == stored(6, dp, tp) == stored(15, dp, tp) == (dp, tp)
    assert stored(9, dp, tp) == (dp,) and stored(5, tp) == (tp,)
    assert stored(6, tp, dp) == (tp,)
