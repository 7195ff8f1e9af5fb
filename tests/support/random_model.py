"""Random models for property tests, and a check of such a model after every pass.

A model is a list of drawn steps, each of which maps a tensor of three dims to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from one_device import assert_close
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Zero
from shardc.runtime.simulator import interpret, simulate

SIZES = (4, 6, 8, 12)
UNEVEN_SIZES = (1, 3, 5, 6, 10)
BY_ROW = (  # ops that compute each sample independently
    "gelu",
    "heads",
    "attention",
    "average",
    "pool",
    "shift",
    "repeat",
    "residual",
    "norm",
    "conv",
    "qkv",
    "linear",
)


@dataclass(frozen=True)
class Step:
    """An op by name, and a number that it may use."""

    op: str
    number: int


class RandomModel(nn.Module):
    """Runs its steps over ``x`` of [batch, length, width]. Steps linear and qkv and those of ``ROWS`` have weights."""

    def __init__(self, width: int, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterDict()
        self.scale = nn.Parameter(torch.rand(width, dtype=torch.float64) + 0.5)
        widths = [width]
        for i, step in enumerate(steps):
            if step.op == "linear":
                widths.append(SIZES[step.number % len(SIZES)])
                self.weights[str(i)] = nn.Parameter(torch.randn(widths[-1], widths[-2], dtype=torch.float64) / 3)
                self.weights[f"{i}_bias"] = nn.Parameter(torch.randn(widths[-1], dtype=torch.float64))
            elif step.op == "qkv":
                self.weights[str(i)] = nn.Parameter(torch.randn(3 * widths[-1], widths[-1], dtype=torch.float64) / 3)
            elif step.op in ROWS:
                rows = ROWS[step.op]
                self.weights[str(i)] = nn.Parameter(torch.randn(rows, widths[-1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = x * self.scale
        now = before
        for i, step in enumerate(self.steps):
            now, before = self._step(i, step, now, before), now
        return now.square().mean() + now.sum(0).mean()

    def _step(self, i: int, step: Step, x: Tensor, before: Tensor) -> Tensor:
        if step.op == "linear":
            return F.linear(x, self.weights[str(i)], self.weights[f"{i}_bias"])
        if step.op == "qkv":
            q, k, v = F.linear(x, self.weights[str(i)]).chunk(3, dim=-1)
            return (q @ k.transpose(1, 2)).softmax(-1) @ v
        if step.op == "norm":
            return F.layer_norm(x, x.shape[-1:], self.weights[str(i)][0])
        if step.op == "table":
            ids = torch.arange(x.shape[1]) * step.number % 7
            return x + F.embedding(ids, self.weights[str(i)])
        if step.op == "conv":
            weight = self.weights[str(i)].T.unsqueeze(1)
            return F.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[-1]).transpose(1, 2)
        if step.op == "residual":
            return x + before if x.shape == before.shape else x + x.mean(1, keepdim=True)
        return STEPS[step.op](x, step.number)


ROWS = {"norm": 1, "table": 7, "conv": 3}  # the rows of a step's weight


def draw_model(data: st.DataObject) -> tuple[RandomModel, Tensor]:
    """A model in which a linear layer follows each op, and its input."""
    ops = (*BY_ROW, "softmax", "flip")
    drawn = data.draw(st.lists(st.builds(Step, st.sampled_from(ops), st.integers(0, 11)), min_size=2, max_size=6))
    steps = tuple(each for step in drawn for each in (step, Step("linear", step.number)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = RandomModel(data.draw(st.sampled_from(SIZES)), steps)
    return model, torch.randn(data.draw(st.integers(1, 9)), data.draw(st.integers(2, 6)), model.scale.shape[0]).double()


def _heads(x: Tensor, number: int) -> Tensor:
    """Split the width into two heads, transpose, and merge again."""
    b, t, d = x.shape
    return x.view(b, t, 2, d // 2).transpose(1, 2).reshape(b, 2 * t, d // 2).reshape(b, t, d) * (1 + number % 2)


def _attention(x: Tensor, number: int) -> Tensor:
    """Attention of two heads, causal if ``number`` is even."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=number % 2 == 0)
    return y.transpose(1, 2).flatten(2)


def _put(x: Tensor, number: int) -> Tensor:
    """``x`` with rows added at positions of an index."""
    where = torch.arange(x.shape[1]) * (number + 1) % x.shape[1]
    return x.index_add(1, where, x.sin()) + torch.zeros_like(x).scatter_add(0, x.argmax(0, keepdim=True), x[:1])


STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "gelu": lambda x, number: F.gelu(x),
    "softmax": lambda x, number: x.softmax(number % 3),
    "transpose": lambda x, number: x * x.sum(dim=number % 3, keepdim=True),
    "heads": _heads,
    "flatten": lambda x, number: (x.flatten(0, 1) * 2).view(x.shape),
    "halves": lambda x, number: torch.cat(x.tensor_split(2, dim=number % 2)[::-1], dim=number % 2),
    "max": lambda x, number: x - x.amax(dim=number % 3, keepdim=True),
    "pool": lambda x, number: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "average": lambda x, number: F.avg_pool1d(x, 3, 1, 1),
    "shift": lambda x, number: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "pipeline": lambda x, number: torch.cat([x[-1:] * 0, x[:-1]]),
    "roll": lambda x, number: x.roll(number % 4, number % 3),
    "attention": _attention,
    "best": lambda x, number: x + x.gather(number % 3, x.argmax(number % 3, keepdim=True)),
    "order": lambda x, number: x.sort(number % 3).values,
    "top": lambda x, number: x + x.topk(1, number % 3).values,
    "pick": lambda x, number: x.index_select(number % 3, torch.arange(x.shape[number % 3]).flip(0)),
    "mask": lambda x, number: x.masked_fill(x > 1, 0.5).tril(number % 3),
    "put": _put,
    "stack": lambda x, number: torch.stack([x, x.sin()], number % 4).sum(number % 4),
    "logsumexp": lambda x, number: x - x.logsumexp(number % 3, keepdim=True),
    "spread": lambda x, number: x / (1 + x.var(number % 3, keepdim=True, correction=0)),
    "batch_norm": lambda x, number: F.batch_norm(torch.cat([x, -x]), None, None, training=True).chunk(2)[0],
    "einsum": lambda x, number: torch.einsum("btd,bsd,bse->bte", x, x.tanh(), x.sigmoid()) / 9,
    "repeat": lambda x, number: x.repeat(1, 2, 1).unfold(1, 2, 2).mean(-1),
    "where": lambda x, number: torch.where(x.sum(0) > 0, x, x.mean(2, keepdim=True)),
    "cumsum": lambda x, number: x.cumsum(number % 3) / 4,
    "flip": lambda x, number: x.flip(number % 3),
}
NAMES = ("linear", "linear", "linear", "qkv", "qkv", *ROWS, "residual", "residual", *STEPS)


@st.composite
def models(draw: st.DrawFn) -> tuple[RandomModel, Tensor]:
    """A model of up to 7 steps and an input."""
    batch, length = (draw(st.sampled_from(SIZES + UNEVEN_SIZES)) for _ in range(2))
    width = draw(st.sampled_from(SIZES))
    steps = draw(st.lists(st.builds(Step, st.sampled_from(NAMES), st.integers(0, 11)), min_size=1, max_size=7))
    torch.manual_seed(draw(st.integers(0, 99)))
    return RandomModel(width, tuple(steps)), torch.randn(batch, length, width, dtype=torch.float64)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of one to three axes, at most 12 ranks."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2), (4, 2), (2, 2, 2), (2, 3, 2)]))
    return Mesh(**dict(zip("abc", sizes, strict=False)))


@st.composite
def annotations(draw: st.DrawFn, model: nn.Module, mesh: Mesh, x: Tensor) -> dict[str, P]:
    """A random ``P`` for the input and for some of the parameters."""
    found = {"x": _spec(draw, mesh, tuple(x.shape))}
    for name, parameter in model.named_parameters():
        if draw(st.booleans()):
            found[f"param:{name}"] = _spec(draw, mesh, tuple(parameter.shape))
    return found


@st.composite
def options(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    """Further options of ``compile``, each a value or None."""
    zero = st.builds(Zero, st.sampled_from(mesh.axis_names), st.sampled_from((1, 2, 3)))
    return {"zero": draw(st.none() | zero), "overlap": draw(st.sampled_from((None, "ring")))}


def _spec(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """A ``P`` in which each axis cuts a drawn dim or none; sizes need not divide."""
    entries: list[list[str]] = [[] for _ in shape]
    for axis in mesh.axis_names:
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            entries[dim].append(axis)
    is_open = draw(st.booleans())
    return P(*(tuple(entry) or (P.OPEN if is_open else None) for entry in entries))


def check_program(data: st.DataObject) -> None:
    """Draw a model, a mesh, annotations and options, and compare with one device after every pass."""
    model, x = data.draw(models())
    mesh = data.draw(meshes())
    check(model, x, mesh, data.draw(annotations(model, mesh, x)), **data.draw(options(mesh)))


def check(model: RandomModel, x: Tensor, mesh: Mesh, chosen: dict[str, P], **options: object) -> None:
    """Assert that the loss and every gradient are those of one device after every pass."""
    loss = model(x)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    compiled = shardc.compile(model, mesh, chosen, args=(x,), **options)
    changed = {
        id(program): (name, program) for name, program in compiled.after.items()
    }  # without passes that change nothing
    for name, program in changed.values():
        runtime = simulate if program.level == "localized" else interpret
        output, gradients = compiled.run(runtime, program, (x,), {})
        assert_close(output, loss.detach(), f"the loss after {name}")
        for (parameter, _), gradient in zip(model.named_parameters(), expected, strict=True):
            if gradient is not None:
                found = gradients[parameter]
                assert found is not None
                assert_close(found, gradient, f"the gradient of {parameter} after {name}")
