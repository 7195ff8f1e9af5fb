"""Attention with dropout: each mesh drops the same, with positions cut or not, and makes no scores of all positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from alive import Alive
from attending import BATCH, WIDTH, Attending, draw, kinds_sent
from gloo_pool import GlooPool
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import shardc
from shardc import Mesh, P, Remat, Zero, compile
from shardc.api import Compiled
from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.ops.attention.products import tiled_workspace
from shardc.ops.attention.ring import mask_workspace
from shardc.ops.attention.tiled import (
    TILED,
    TILED_BACKWARD,
    tiled_attention,
    tiled_attention_backward,
    tiled_attention_mask_backward,
)

TOLERANCE = 1e-10
RATE = 0.4


class Dropping(Attending):
    """``window``: how many keys a query sees, its own the last; all before it if None."""

    def __init__(self, window: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.window is not None:
            row, column = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2]).unsqueeze(0)
            mask = (column <= row) & (column > row - self.window)
        return scaled_dot_product_attention(
            q, k, v, mask, RATE, self.is_causal and mask is None, scale=self.scale,
            enable_gqa=self.num_keys != self.heads,
        )  # fmt: skip


def compiled_step(
    model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], axis: str | None, **options: Any
) -> Compiled:
    batch = "dp" if "dp" in mesh.axis_names else None
    cut = {name: P(batch, axis) for name in inputs if name != "mask"}
    return compile(model, mesh, cut | options.pop("annotations", {}), kwargs=inputs, **options)


def check(model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], axis: str | None = "cp", **options: Any) -> Compiled:
    """The compiled step with positions cut by an axis; its loss and gradients must be those of a mesh of one rank."""
    compiled = compiled_step(model, mesh, inputs, axis, **options)
    alone = compile(model, Mesh(one=1), {}, kwargs=inputs)
    (loss, gradients), (expected, wanted) = (each.simulate(**inputs) for each in (compiled, alone))
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in wanted.items():
        largest = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE * largest, msg=name)
    return compiled


@settings(max_examples=40)
@given(
    st.sampled_from([2, 3, 4, 8]), st.integers(2, 21), st.none() | st.integers(2, 21), st.booleans(),
    st.sampled_from([1, 2, 4]), st.sampled_from(["auto", "ring", "gather"]), st.sampled_from(["cp", "cp:zigzag"]),
)  # fmt: skip
def test_a_step_is_that_of_a_mesh_of_one(
    count: int, queries: int, keys: int | None, is_causal: bool, num_keys: int, way: str, axis: str
) -> None:
    torch.manual_seed(0)
    model = Dropping(num_keys=num_keys, is_causal=is_causal, scale=0.3).double()
    check(model, Mesh(cp=count), draw(queries, keys), axis, attention=way)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, cp=2), {}),
        (Mesh(dp=2, cp=3), {"zero": Zero("dp", stage=3)}),
        (Mesh(cp=2, tp=2), {"annotations": {name: P("tp") for name in ("q.*", "k.*", "v.*")}}),
        (Mesh(cp=4), {"remat": Remat("*")}),
        (Mesh(cp=2), {"attention": "ulysses"}),
        (Mesh(dp=2), {}),
    ],
    ids=["dp", "zero 3", "tp", "remat", "ulysses", "dp alone"],
)
def test_other_axes_and_options_drop_the_same(mesh: Mesh, options: Any) -> None:
    torch.manual_seed(0)
    axis = "cp" if "cp" in mesh.axis_names else None
    options = {"attention": "ring"} | options
    compiled = check(Dropping().double(), mesh, draw(9), axis, **options)
    assert ("ring_attention" in kinds_sent(compiled)) == (axis is not None and options["attention"] == "ring")


MASKS = {
    "rows of booleans": lambda n: torch.rand(n, n) > 0.4,
    "a row that sees nothing": lambda n: torch.arange(n).expand(n, n) < torch.arange(n).unsqueeze(1),
    "scores of each head": lambda n: torch.randn(1, 4, n, n, dtype=torch.float64),
    "heads without samples": lambda n: torch.randn(4, n, n, dtype=torch.float64),
    "one row for all": lambda n: torch.rand(BATCH, 1, 1, n) > 0.3,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_go_with_dropout(name: str) -> None:
    torch.manual_seed(0)
    model = Dropping(is_causal=False).double()
    for length in (8, 13):
        check(model, Mesh(cp=2), draw(length) | {"mask": MASKS[name](length)}, attention="ring")


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_a_window_sends_its_rows_and_nothing_of_positions_by_positions_is_made(axis: str) -> None:
    torch.manual_seed(0)
    compiled = check(Dropping(window=3).double(), Mesh(cp=4), draw(16), axis)
    if axis == "cp":
        sent = {each.name: each.wire_bytes for each in compiled.collectives if "ring" in each.name}
        assert sent["ring_attention"] == 2 * 2 * 8 * BATCH * WIDTH
    types = [type_ for node in compiled.program.graph.nodes for type_ in compiled.program.types(node) if type_]
    assert not [type_ for type_ in types if type_.shape[-2:] == (16, 16)]


# Beside its definition.


def kept_by(op_args: tuple[Any, ...], shape: tuple[int, int, int, int]) -> Tensor:
    """What each probability is multiplied by: of uniform attention to values that are an identity matrix."""
    batch, heads, rows, columns = shape
    q, k = torch.zeros(batch, heads, rows, columns), torch.zeros(batch, heads, columns, columns)
    v = torch.eye(columns).expand(batch, heads, columns, columns).contiguous()
    out, _ = TILED(q, k, v, *op_args, False, None, 1.0)
    return (out * columns).double()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rate", [0.0001, 0.3, 1.0])
def test_probabilities_are_dropped_after_the_softmax(
    rate: float, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients are those that autograd gives of the definition; also in small tiles, a sample at a time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (20, 24, 24))
    first = (torch.arange(3 * 4 * 20) * 24).view(3, 4, 20)
    drawn = torch.tensor([1, 2]), first, rate, 9
    kept = kept_by(drawn, (3, 4, 20, 24))
    is_other_number = (kept != 0) & ((kept - 1 / (1 - rate if rate < 1 else 1)).abs() > 1e-5)
    assert not is_other_number.any() and abs((kept == 0).double().mean() - rate) < 0.05
    hidden = torch.ones(20, 24, dtype=torch.bool).triu(1) if is_causal else torch.zeros(20, 24, dtype=torch.bool)
    scores = (q @ k.mT * 0.3).masked_fill(hidden, -torch.inf)
    expected = (scores.softmax(-1) * kept.round(decimals=6).sign() / (1 - rate if rate < 1 else 1)) @ v
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for tile, most in ((1024, 2**24), (8, 1)):
        monkeypatch.setattr("shardc.ops.attention.ring.TILE", tile)
        monkeypatch.setattr("shardc.ops.attention.products.MOST_SCORES", most)
        with torch.no_grad():
            out, lse = TILED(q, k, v, *drawn, is_causal, None, 0.3)
            found = TILED_BACKWARD(grad, q, k, v, out, lse, *drawn, is_causal, None, 0.3)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=TOLERANCE)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_keys", [4, 2, 1])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bytes_of_scores_are_as_announced(
    dtype: torch.dtype, rate: float, num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of 256 of 512 positions, of two heads at a time; the mask and operands add a third at most.

    The gradient of a mask is summed in float32 before it has the dtype of the others.
    """
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 256)
    monkeypatch.setattr("shardc.ops.attention.products.MOST_SCORES", 2 * 256**2)
    q, k, v = (torch.randn(1, heads, 512, 4, dtype=dtype) for heads in (4, num_keys, num_keys))
    drawn = (torch.tensor([1, 2]), torch.arange(4 * 512).view(1, 4, 512)) if rate else (None, None)
    out, lse = TILED(q, k, v, *drawn, rate, 0, True, None, None)
    with torch.no_grad(), Alive() as forward:
        tiled_attention._init_fn(q, k, v, *drawn, rate, 0, True, None, None)
    with torch.no_grad(), Alive() as backward:
        tiled_attention_backward._init_fn(out, q, k, v, out, lse, *drawn, rate, 0, True, None, None)
    mask = torch.zeros(1, 4, 512, 512, dtype=dtype)
    with torch.no_grad(), Alive() as of_mask:
        tiled_attention_mask_backward._init_fn(out, q, k, v, out, lse, *drawn, rate, 0, False, mask, None)
    types, gradients = (TensorType.of(q), TensorType.of(k)), [each.nbytes * 4 // each.itemsize for each in (q, k, v)]
    for alive, results, is_backward in (
        (forward, sum(each.nbytes * 4 // each.itemsize for each in (out, lse)), False),
        (backward, sum(gradients), True),
        (of_mask, sum(gradients) + 2 * mask.nbytes, True),  # the mask that is given counts too
    ):
        most, announced = alive.most - results, tiled_workspace(*types, 256, rate, is_backward=is_backward)
        announced = mask_workspace(TensorType.of(mask), announced) if alive is of_mask else announced
        assert 0.9 * announced < most < 1.34 * announced, (announced, most)


def test_each_layer_and_each_step_drops_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            values = x.flatten(0, 1).unsqueeze(0).unsqueeze(0) @ self.weight
            zeros = torch.zeros_like(values)
            return torch.stack([scaled_dot_product_attention(zeros, zeros, values, dropout_p=0.5) for _ in range(2)])

    parallel = shardc.parallelize(Twice(), Mesh(dp=2), {"x": P("dp")})
    x = torch.eye(8).view(4, 2, 8)
    first, second = parallel(x), parallel(x)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)
    parallel.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_dtype_is_near_to_a_wide_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact, inputs = Dropping().double(), draw(32)
    narrow = Dropping()
    narrow.load_state_dict(exact.state_dict())
    own = {name: value.to(dtype) for name, value in inputs.items()}
    wanted = compile(exact, Mesh(one=1), {}, kwargs=inputs).simulate(**inputs)[1]
    found = compiled_step(narrow.to(dtype), Mesh(cp=4), own, "cp", attention="ring").simulate(**own)[1]
    distances = [(found[name].double() - gradient).norm() for name, gradient in wanted.items()]
    largest = max(gradient.norm() for gradient in wanted.values())
    assert max(distances) < largest * (1e-6 if dtype == torch.float32 else 0.02)


def test_autocast_gives_attention_its_dtype() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Dropping()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out: Tensor = self.inner(x)
            return out.float()

    inputs = draw(8, dtype=torch.float32)
    compiled = compiled_step(Cast(), Mesh(cp=2), inputs, "cp", attention="ring")
    (ring,) = (node for node in compiled.program.calls if node.name == "ring_attention")
    assert str(compiled.program.types(ring)[0]).startswith("bf16")


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_there_may_be_no_keys(axis: str) -> None:
    model, inputs = Dropping(is_causal=False).double(), draw(4) | {"y": torch.empty(BATCH, 0, WIDTH).double()}
    compiled = compile(model, Mesh(cp=2), {"x": P(None, axis)}, kwargs=inputs, attention="ring")
    alone = compile(model, Mesh(one=1), {}, kwargs=inputs)
    torch.testing.assert_close(compiled.simulate(**inputs)[0], alone.simulate(**inputs)[0])


@pytest.mark.parametrize(
    "mask",
    [torch.ones(8, 8, dtype=torch.int64), torch.ones(8, 7, dtype=torch.bool)],
    ids=["whole numbers", "too few keys"],
)
def test_a_mask_that_torch_refuses_is_refused(mask: Tensor) -> None:
    with pytest.raises(CaptureError, match="attn_mask|broadcast"):
        compile(Dropping(is_causal=False), Mesh(cp=2), {}, kwargs=draw(8, dtype=torch.float32) | {"mask": mask})


@pytest.mark.slow
def test_compiled_code_drops_the_same() -> None:
    inputs, losses = draw(8, dtype=torch.float32), list[Tensor]()
    for options in ({}, {"compile": "inductor"}):
        torch.manual_seed(0)
        parallel = shardc.parallelize(Dropping(), Mesh(dp=2), {"x": P("dp")}, **options)  # type: ignore[arg-type]
        losses.append(parallel(**inputs))
        losses[-1].backward()
        losses += [parallel.q.weight.grad]
    torch.testing.assert_close(losses[:2], losses[2:])


def step_on_ranks() -> Any:
    torch.manual_seed(0)
    model = Dropping().double()
    inputs = draw(13)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    parallel = shardc.parallelize(model, mesh, {"x": P(None, "cp")}, attention="ring", seed=5)
    parallel(**inputs).backward()
    return {name: whole(each.grad) for name, each in parallel.named_parameters()}


def test_ranks_of_their_own_drop_the_same(gloo: GlooPool) -> None:
    torch.manual_seed(0)
    alone = shardc.parallelize(Dropping().double(), Mesh(one=1), seed=5)
    alone(**draw(13)).backward()
    for found in gloo.run(step_on_ranks):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=TOLERANCE * 100, msg=name)
