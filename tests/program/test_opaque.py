"""Custom and higher-order ops run whole on every rank, with the right loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardc
from shardc import CaptureError, Mesh, P, ShardingError
from shardc.program.opaque import Opaque
from shardc.program.traffic import fallbacks_of
from shardc.runtime.comm.distributed import make_device_mesh

MESH = Mesh(dp=2, tp=2)
ANNOTATIONS = {"x": P("dp"), "linear.weight": P("tp"), "second": P("tp")}


class Model(nn.Module):
    """A linear layer, a second weight and a function of both."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name
        self.second = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return MODELS[self.name](self, x)


def model(name: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(name).double(), torch.randn(4, 8, dtype=torch.float64)


def assert_trains_alike(alone: nn.Module, x: Tensor, mesh: Any = MESH, **options: Any) -> Any:
    """Two steps on the mesh and alone give the same losses and gradients; the program."""
    parallel = shardc.parallelize(alone, mesh, ANNOTATIONS, **options)
    for step in range(2):
        losses = [each(x + step) for each in (parallel, alone)]
        torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-12, atol=1e-12)
        for each, loss in zip((parallel, alone), losses, strict=True):
            each.zero_grad()
            loss.backward()
        for (name, mine), theirs in zip(parallel.named_parameters(), alone.parameters(), strict=True):
            if theirs.grad is not None:
                found = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
                torch.testing.assert_close(found, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)
    return parallel.program


def fallbacks(program: Any) -> list[str]:
    nodes = fallbacks_of(program.at("fuse_collectives"))
    return [node.target.name if isinstance(node.target, Opaque) else str(node.target) for node in nodes]


# Ops of the user's own.


@torch.library.custom_op("tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x.sin() * factor


@torch.library.custom_op("tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("tests::write", mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


@torch.library.custom_op("tests::add_sine", mutates_args=("out",))
def add_sine(out: Tensor, x: Tensor) -> Tensor:
    return out.add_(x.sin()) * 2


@torch.library.custom_op("tests::many", mutates_args=())
def many(xs: list[Tensor], weight: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    return xs[0] + xs[1], [x * 2 for x in xs]


@torch.library.custom_op("tests::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    """As a kernel does that takes it for granted that rows follow each other in memory."""
    return torch.as_strided(x, (x.numel(),), (1,), 0).clone().view(x.shape)


scaled.register_fake(lambda x, factor: torch.empty_like(x))
sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
write.register_fake(lambda x, out: None)
add_sine.register_fake(lambda out, x: torch.empty_like(out))
many.register_fake(lambda xs, weight=None: (torch.empty_like(xs[0]), [torch.empty_like(x) for x in xs]))
rows.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))


class Exp(torch.autograd.Function):
    """A gradient that is three times the derivative, so that no one derives it anew."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 3


class Square(torch.autograd.Function):
    """The older form, that keeps its input in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 5


def written(self: Model, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    write(x, out)
    return self.linear(out).square().sum()


def added(self: Model, x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    twice = add_sine(out, x)
    return self.linear(out + twice).square().sum()


def nested(self: Model, x: Tensor) -> Tensor:
    total, doubled = many([x, x + 1])
    return (self.linear(total) + doubled[0] + doubled[1]).square().sum()


OPS: dict[str, tuple[Callable[[Model, Tensor], Tensor], list[str]]] = {
    "without a backward": (
        lambda self, x: self.linear(x).sum() + scaled(self.linear(x).detach(), 2.0).sum(), ["tests.scaled.default"]
    ),
    "with a backward": (lambda self, x: sine(self.linear(x)).square().sum(), ["tests.sine.default"]),
    "that writes an operand": (written, ["tests.write"]),
    "that writes and returns": (added, ["tests.add_sine"]),
    "with lists": (nested, ["tests.many"]),
    "autograd.Function": (lambda self, x: Exp.apply(self.linear(x)).sum(), []),
    "autograd.Function, older form": (lambda self, x: Square.apply(self.linear(x)).sum(), []),
}  # fmt: skip


# Higher-order ops.


def branch(self: Model, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1, lambda t: self.linear(t).sin(), lambda t: (t @ self.second) * 2, (x,)).sum()


def branch_apart(self: Model, x: Tensor) -> Tensor:
    """Of the branch that is not taken the gradient would be no number."""
    y = self.linear(x)

    def taken(t: Tensor) -> tuple[Tensor, Tensor]:
        return Exp.apply(t @ self.second), t + 1

    def left(t: Tensor) -> tuple[Tensor, Tensor]:
        return (0 * t).sqrt(), t.detach() * 2

    one, other = torch.cond(y.sum() < 1000, taken, left, (y,))
    return (one * other).sum()


def branch_in_branch(self: Model, x: Tensor) -> Tensor:
    y = self.linear(x)

    def inner(t: Tensor) -> Tensor:
        return torch.cond(t.sum() > 0, lambda u: u * 3, lambda u: u @ self.second, (t,))

    return torch.cond(y.sum() < 1000, inner, lambda t: t * 2, (y,)).sum()


def loop(self: Model, x: Tensor) -> Tensor:
    def goes_on(count: Tensor, y: Tensor) -> Tensor:
        return (y.abs().max() < 20) & (count < 50)

    count, y = while_loop(goes_on, lambda i, y: (i + 1, (1.5 * y) @ self.second), (torch.tensor(0), self.linear(x)))
    return y.sin().sum() + count


def scanned(self: Model, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = carry + row.sin() @ self.second
        return carry, carry * 2

    carry, rows = scan(step, torch.zeros(8, dtype=x.dtype), self.linear(x))
    return carry.sum() + rows.square().sum()


def attention(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        heads = self.linear(x).view(2, 2, 2, 4)
        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 2, 2, device="cpu")
        mixed = flex_attention(
            heads, heads, heads, lambda score, b, h, i, j: score + (i - j) * self.second[0, 0], causal
        )
    return (mixed.view(4, 8) * self.linear(x)).sum()


HIGHER: dict[str, tuple[Callable[[Model, Tensor], Tensor], list[str]]] = {
    "cond": (branch, ["cond", "cond_backward"]),
    "cond, one branch at a time": (branch_apart, ["cond", "cond_backward"]),
    "cond in cond": (branch_in_branch, ["cond", "cond_backward"]),
    "cond without operands": (
        lambda self, x: torch.cond(x.sum() > 1, lambda: self.second.sin(), lambda: self.second * 2).sum(),
        ["cond", "cond_backward"],
    ),
    "while_loop": (loop, ["while_loop", "while_loop_backward"]),
    "map": (lambda self, x: map(lambda row, w: (row @ w).sin(), self.linear(x), self.second).square().sum(), []),
    "scan": (scanned, []),
    "associative_scan": (
        lambda self, x: associative_scan(torch.mul, self.linear(x), 0, combine_mode="generic").square().sum(), []
    ),
    "flex_attention": (attention, []),
    "vmap": (lambda self, x: torch.func.vmap(lambda row: row @ self.second[0])(self.linear(x)).square().sum(), []),
    "grad": (lambda self, x: torch.func.grad(lambda t: self.linear(t).sin().sum())(x).square().sum(), []),
    "jvp": (lambda self, x: torch.func.jvp(lambda t: self.linear(t).sin(), (x,), (x,))[1].square().sum(), []),
    "checkpoint": (lambda self, x: checkpoint(self.linear, x, use_reentrant=False).square().sum(), []),
    "reentrant checkpoint": (
        lambda self, x: checkpoint(self.linear, self.linear(x), use_reentrant=True).square().sum(), []
    ),
    "checkpoint_sequential": (
        lambda self, x: checkpoint_sequential([self.linear, torch.tanh], 2, x, use_reentrant=False).square().sum(), []
    ),
    "torch.compile": (lambda self, x: torch.compile(lambda t: self.linear(t).sin(), backend="eager")(x).sum(), []),
    "a hook": (lambda self, x: hooked(self.linear(x)).square().sum(), []),
}  # fmt: skip


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


MODELS = {name: function for name, (function, _) in (OPS | HIGHER).items()}


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_the_users_own_runs_whole_and_is_listed(name: str) -> None:
    program = assert_trains_alike(*model(name))
    assert fallbacks(program) == OPS[name][1]
    assert all(op.removesuffix(".default") in program.dump() for op in OPS[name][1])


@pytest.mark.parametrize("name", HIGHER)
def test_a_higher_order_op_runs_whole_or_is_written_out(name: str) -> None:
    program = assert_trains_alike(*model(name))
    assert fallbacks(program) == HIGHER[name][1]


# What cannot be.


def body_of(fn: Callable[[Tensor], Any]) -> Callable[[Model, Tensor], Tensor]:
    return lambda self, x: torch.cond(x.sum() > 0, fn, lambda t: t * 2, (self.linear(x),)).sum()


REFUSED: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "draws": (body_of(lambda t: nn.functional.dropout(t)), "draws random numbers, which would not be the same"),
    "changes": (
        lambda self, x: torch.cond(x.sum() > 0, lambda t: t + self.seen.add_(1), lambda t: t * 2, (x,)).sum(),
        "changes a tensor in place that is not its own",
    ),
    "shapes": (body_of(lambda t: t[:2]), r"one branch returns \(f64\[2, 8\]\), the other \(f64\[4, 8\]\)"),
    "no tensor": (body_of(lambda t: 3.0), "returns what is no tensor"),
}  # fmt: skip
MODELS |= {name: function for name, (function, _) in REFUSED.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_cannot_run_on_every_rank_alike_is_refused_with_its_line(name: str) -> None:
    alone, x = model(name)
    with pytest.raises(CaptureError, match=REFUSED[name][1]) as raised:
        shardc.compile(alone, MESH, {}, args=(x,))
    assert raised.value.who.startswith("test_opaque.py:") and raised.value.who.endswith(": torch.cond")


def test_a_while_loop_whose_carry_changes_shape_is_refused() -> None:
    MODELS["grows"] = lambda self, x: while_loop(lambda y: y.sum() < 9, lambda y: torch.cat([y, y]), (x,))[0].sum()
    alone, x = model("grows")
    with pytest.raises(CaptureError, match=r"its body turns \(f64\[4, 8\]\) into \(f64\[8, 8\]\)"):
        shardc.compile(alone, MESH, {}, args=(x,))


def test_a_custom_op_is_given_contiguous_tensors() -> None:
    MODELS["rows"] = lambda self, x: rows(x.t().contiguous())[0]
    alone, x = model("rows")
    found, _ = shardc.compile(alone, MESH, {}, args=(x,)).simulate(x)
    torch.testing.assert_close(found, x[:, 0])


@pytest.mark.parametrize("name", ["map", "scan"])
def test_a_long_map_or_scan_is_an_opaque_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("shardc.capture.higher_order.MAX_STEPS", 3)
    assert fallbacks(assert_trains_alike(*model(name))) == ["scan", "scan_backward"]


@torch.library.custom_op("tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


noise.register_fake(torch.empty_like)


def test_an_op_of_the_users_own_that_draws_is_found_at_its_first_run() -> None:
    MODELS["noise"] = lambda self, x: noise(x).sum()
    alone, x = model("noise")
    with pytest.raises(ShardingError, match=r"noise: an op of your own\n  it draws random numbers") as raised:
        shardc.compile(alone, MESH, ANNOTATIONS, args=(x,)).simulate(x)
    assert "drawn in the model" in raised.value.remedy


def test_any_other_higher_order_op_is_captured_as_it_is() -> None:
    def product(self: Model, x: Tensor) -> Tensor:
        ones = torch.ones(4, 4, dtype=torch.int8)
        return self.linear(x).sum() + out_dtype(torch.ops.aten.mm.default, torch.int32, ones, ones).sum()

    MODELS["out_dtype"] = product
    assert fallbacks(assert_trains_alike(*model("out_dtype"))) == ["out_dtype"]


def test_a_higher_order_op_that_is_called_as_an_op_is_refused() -> None:
    MODELS["direct"] = lambda self, x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    alone, x = model("direct")
    with pytest.raises(CaptureError, match="cond is called as an op\n  call the function of torch of that name"):
        shardc.compile(alone, MESH, {}, args=(x,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cond in cond", pytest.param("that writes and returns", marks=pytest.mark.sweep)])
def test_opaque_calls_stay_opaque_to_inductor(name: str) -> None:
    assert_trains_alike(*model(name), Mesh(dp=2, tp=1), compile="inductor")


def run_on_gloo(name: str) -> None:
    assert_trains_alike(*model(name), make_device_mesh(MESH))


@pytest.mark.parametrize(
    "name", [pytest.param("cond in cond", marks=pytest.mark.sweep), "while_loop", "that writes and returns"]
)
def test_opaque_calls_run_on_real_ranks(gloo: Any, name: str) -> None:
    gloo.run(run_on_gloo, name)
