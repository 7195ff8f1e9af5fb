"""Attention whose mask needs a gradient: numbers of one device, and rings in which keys and values alone go round."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from typing import Any

import pytest
import sympy
import torch
from attending import BATCH, WIDTH, Attending, check_compiled, draw, kinds_sent
from gloo_pool import GlooPool
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import measured, without_optimizer
from parallel_models import whole
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import embedding, scaled_dot_product_attention

from shardc import Mesh, P, Remat, Zero, compile, parallelize
from shardc.api import Compiled
from shardc.ops.attention.mask import AS_IT_IS
from shardc.ops.attention.products import tiled_workspace
from shardc.ops.attention.ring import TILE, Ring, mask_workspace, ring_workspace
from shardc.program.communication import ring_of

TOLERANCE = 1e-10
SHAPES = {
    "of heads": (1, 4, -2, -1), "of samples": (BATCH, 1, -2, -1), "of all": (BATCH, 4, -2, -1), "for all": (-2, -1),
    "one row": (1, 4, 1, -1), "one column": (1, 1, -2, 1), "of three dims": (4, -2, -1),
}  # fmt: skip


class Biased(Attending):
    """Its mask is a parameter."""

    def __init__(self, shape: str, queries: int, keys: int | None = None, rate: float = 0.0, **options: Any) -> None:
        super().__init__(is_causal=False, **options)
        sizes = {-2: queries, -1: keys or queries}
        self.bias = nn.Parameter(torch.randn([sizes.get(size, size) for size in SHAPES[shape]]))
        self.rate = rate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        mask = self.bias if mask is None else mask
        return scaled_dot_product_attention(
            q, k, v, mask, self.rate, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def check(model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], axis: str = "cp", **options: Any) -> Compiled:
    """The compiled step, by one ring; its loss and gradients must be those of one device."""
    batch = "dp" if "dp" in mesh.axis_names else None
    cut = {name: P(batch, axis) for name in inputs} | options.pop("annotations", {})
    compiled = compile(model, mesh, cut, kwargs=inputs, **{"attention": "ring", **options})
    if getattr(model, "rate", 0.0):  # which torch draws otherwise
        alone = compile(model, Mesh(one=1), {}, kwargs=inputs)
        (loss, gradients), (expected, wanted) = (each.simulate(**inputs) for each in (compiled, alone))
        torch.testing.assert_close((loss, gradients), (expected, wanted), rtol=TOLERANCE, atol=TOLERANCE)
    else:
        check_compiled(compiled, model, inputs, TOLERANCE)
    return compiled


def rings(compiled: Compiled) -> list[str]:
    """The rings of a step. Beside them no more is gathered than a row of a mask."""
    assert not [each for each in compiled.collectives if each.kind == "all_gather" and each.wire_bytes > 16]
    kinds = kinds_sent(compiled) + kinds_sent(compiled, "backward")
    return [kind for kind in kinds if "ring" in kind]


ONE = ["ring_attention", "ring_attention_backward"]


@settings(max_examples=8)
@given(
    st.sampled_from([2, 3, 4]), st.integers(2, 13), st.none() | st.integers(2, 13), st.sampled_from([1, 2, 4]),
    st.sampled_from([*SHAPES]), st.sampled_from(["cp", "cp:zigzag"]), st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_a_step_is_that_of_one_device(
    count: int, queries: int, keys: int | None, num_keys: int, shape: str, axis: str, rate: float
) -> None:
    torch.manual_seed(0)
    model = Biased(shape, queries, keys, rate, num_keys=num_keys, scale=0.3).double()
    compiled = check(model, Mesh(cp=count), draw(queries, keys), axis)
    assert [kind for way in ("forward", "backward") for kind in kinds_sent(compiled, way) if "ring" in kind] == ONE


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, cp=2), {}),
        (Mesh(dp=2, cp=3), {"zero": Zero("dp", stage=1)}),
        (Mesh(cp=2, tp=2), {"annotations": {name: P("tp") for name in ("q.*", "k.*", "v.*")}}),
        (Mesh(cp=4), {"remat": Remat("*")}),
        (Mesh(cp=2), {"attention": "ulysses"}),
        (Mesh(cp=4), {"attention": "gather"}),
        (Mesh(dp=2), {}),
    ],
    ids=["dp", "zero 1", "tp", "remat", "ulysses", "gather", "dp alone"],
)
def test_other_axes_and_options_have_the_same_numbers(mesh: Mesh, options: Any) -> None:
    torch.manual_seed(0)
    axis = "cp" if "cp" in mesh.axis_names else None
    compiled = check(Biased("of heads", 9).double(), mesh, draw(9), axis, **options)  # type: ignore[arg-type]
    assert ("ring_attention" in kinds_sent(compiled)) == (axis is not None and "attention" not in options)


@pytest.mark.parametrize("num_keys", [4, 1])
def test_a_ring_sends_keys_and_values_alone_and_in_backward_twice(num_keys: int) -> None:
    inputs = draw(24, dtype=torch.float32)
    model = Biased("of heads", 24, num_keys=num_keys)
    compiled = compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    keys_and_values = 2 * 4 * BATCH * 24 * WIDTH * num_keys // 4
    sent = {each.name: each.wire_bytes for each in compiled.collectives if "ring" in each.name}
    assert sent == {ONE[0]: keys_and_values * 3 // 4, ONE[1]: 2 * keys_and_values * 3 // 4}
    assert rings(compiled) == ONE and str(compiled.shardings["bias"]) == "[_, _, _@cp, _]"
    assert "4 chunks of 24 queries and 24 keys, with the gradient of the mask" in compiled.dump()


class Efficient(Biased):
    """Attention by torch's kernel of CUDA, which can be traced anywhere."""

    is_traced = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not self.is_traced:
            return super().attend(q, k, v, mask)
        bias = self.bias.expand(*q.shape[:3], k.shape[2])
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]
        return out


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_torchs_kernel_of_cuda_gives_way_where_it_cannot_go_round(axis: str) -> None:
    torch.manual_seed(0)
    model, inputs = Efficient("of heads", 12).double(), draw(12)
    compiled = compile(model, Mesh(cp=3), {"x": P(None, axis)}, kwargs=inputs, attention="ring")
    model.is_traced = False
    check_compiled(compiled, model, inputs, TOLERANCE)
    assert [kind for way in ("forward", "backward") for kind in kinds_sent(compiled, way) if "ring" in kind] == ONE
    model.is_traced = True
    kept = compile(model, Mesh(dp=2), {"x": P("dp")}, kwargs=inputs)
    assert "_scaled_dot_product_efficient_attention_backward" in kept.dump()


class Buckets(Biased):
    """A bias for each distance, as T5 has; later keys and those of padding are hidden by a number, or by -inf."""

    def __init__(self, hidden: float, is_padded: bool = False, **options: Any) -> None:
        super().__init__("for all", 1, **options)
        self.bias = nn.Parameter(torch.randn(7, 4))
        self.hidden, self.is_padded = hidden, is_padded

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        row, column = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])
        bias = embedding((column - row).clamp(-3, 3) + 3, self.bias).permute(2, 0, 1).unsqueeze(0)
        seen = (column <= row) & (row != 5)  # one that sees none
        if self.is_padded:
            seen = seen & (column < torch.arange(5, 5 + BATCH).view(-1, 1, 1, 1))
        return super().attend(q, k, v, torch.where(seen, bias, torch.tensor(self.hidden, dtype=bias.dtype)))


@pytest.mark.parametrize(
    ("hidden", "axis", "rate"),
    [
        (torch.finfo(torch.float64).min, "cp", 0.0),
        (torch.finfo(torch.float64).min, "cp:zigzag", 0.3),
        (-1e9, "cp:zigzag", 0.0),
        (-torch.inf, "cp", 0.3),
    ],
)
def test_what_a_number_hides_is_as_on_one_device(
    hidden: float, axis: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it hides all keys of a query, whose result is the mean of all values."""
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 2)
    monkeypatch.setattr("shardc.ops.attention.products.MOST_SCORES", 16)
    monkeypatch.setattr(f"{__name__}.TOLERANCE", 1e-6 if hidden == -1e9 else TOLERANCE)
    torch.manual_seed(0)
    compiled = check(Buckets(hidden, is_padded=True, rate=rate).double(), Mesh(cp=3), draw(8), axis)
    assert rings(compiled) == ONE


class Near(Biased):
    """A bias for each distance below 3 to both sides; what is further off is not seen."""

    def __init__(self, rate: float) -> None:
        super().__init__("for all", 1, rate=rate, num_keys=2)
        self.bias = nn.Parameter(torch.randn(5, 4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        far = torch.arange(k.shape[2]) - torch.arange(q.shape[2]).unsqueeze(1)
        bias = embedding(far.clamp(-2, 2) + 2, self.bias).permute(2, 0, 1).unsqueeze(0)
        return super().attend(q, k, v, torch.where(far.abs() < 3, bias, torch.tensor(-torch.inf, dtype=bias.dtype)))


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("count", "length"), [(3, 14), (4, 24)])
def test_keys_that_go_both_ways_give_the_gradient_of_a_mask(
    count: int, length: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of keys go to each neighbour."""
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 2)
    torch.manual_seed(0)
    compiled = check(Near(rate).double(), Mesh(cp=count), draw(length))
    sent = [(each.steps, each.wire_bytes) for each in compiled.collectives if "ring" in each.name]
    rows = 2 * 8 * BATCH * WIDTH // 2 * 4
    assert rings(compiled) == ONE and sent == [(2, rows), (2, 2 * rows)]


def test_no_rank_has_a_mask_of_all_rows_and_none_is_saved_for_each_sample() -> None:
    torch.manual_seed(0)
    model, length = Buckets(-1e9, is_padded=True).double(), 16
    for axis in ("cp", "cp:zigzag"):
        program = check(model, Mesh(cp=4), draw(length), axis).program
        values = [(node, i) for node in program.calls for i, _ in enumerate(program.types(node))]
        local = [type_ for each in values if (type_ := program.local_type(*each))]
        assert not [type_ for type_ in local if type_.shape[-2:] == (length, length)]
        forward = [program.value_type(each) for each in values if program.source(each[0]).phase == "forward"]
        assert (BATCH, 4, length, length) not in {type_.shape for type_ in forward}


class Slopes(Biased):
    """ALiBi, of which the slopes are learned."""

    def __init__(self) -> None:
        super().__init__("for all", 1)
        self.bias = nn.Parameter(torch.tensor([0.5, 0.25, 0.1, 0.0]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        position = torch.arange(q.shape[2])
        return super().attend(q, k, v, self.bias.view(4, 1, 1) * (position - position.unsqueeze(1)))


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_what_is_made_of_vectors_is_made_tile_by_tile(axis: str) -> None:
    torch.manual_seed(0)
    compiled = check(Slopes().double(), Mesh(cp=4), draw(16), axis)
    assert rings(compiled) == ONE
    forward = [node for node in compiled.program.calls if compiled.program.source(node).phase == "forward"]
    types = [type_ for node in forward for type_ in compiled.program.types(node) if type_]
    assert not [type_ for type_ in types if type_.shape[-2:] == (16, 16)]


def test_over_any_number_of_ranks_a_bias_hides_nothing() -> None:
    """So that costs as functions of the mesh have an expression."""
    count: Any = sympy.Symbol("cp")
    ring = Ring("tiled", count, 16, 16, False, None, made_by=astuple(AS_IT_IS))
    assert ring.sent is None and ring.steps == count - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_announced_are_those_alive(dtype: torch.dtype) -> None:
    """Of one layer whose mask is most of what there is; a ring holds besides what it says of itself."""
    inputs = draw(64, dtype=dtype)
    for mesh in (Mesh(cp=1), Mesh(cp=4)):
        compiled = compile(Biased("of heads", 64).to(dtype), mesh, {"x": P(None, "cp")}, kwargs=inputs)
        found, wanted = measured(compiled, **inputs), without_optimizer(compiled.memory)
        in_ring = sum(workspace(compiled, node) for node in compiled.program.calls if node.name == ONE[1])
        assert found["saved"] == pytest.approx(wanted["saved"], rel=0.01)
        assert found["peak"] + in_ring == pytest.approx(wanted["peak"], rel=0.01)


def workspace(compiled: Compiled, node: fx.Node) -> int:
    """What a backward ring holds besides operands and results, which nobody sees who runs it."""
    ring, program = ring_of(node), compiled.program
    assert ring is not None
    of_mask, q, k, v = program.local_type(node, 3), *(program.local_type(each) for each in node.all_input_nodes[1:4])
    assert of_mask and q and k and v
    scores = tiled_workspace(q, k, TILE, 0.0, is_backward=True)
    return mask_workspace(of_mask, ring_workspace(ring, k, v, is_backward=True) + scores)


def test_scores_are_not_saved() -> None:
    """torch itself saves those of all heads where a mask needs a gradient."""
    compiled = compile(Biased("of heads", 64), Mesh(one=1), {}, kwargs=draw(64, dtype=torch.float32))
    assert compiled.memory["saved"] < 4 * BATCH * 4 * 64 * 64


def test_there_may_be_no_keys() -> None:
    model, inputs = Biased("of heads", 4).double(), draw(4) | {"y": torch.empty(BATCH, 0, WIDTH).double()}
    model.bias = nn.Parameter(torch.empty(1, 4, 4, 0).double())
    compiled = compile(model, Mesh(cp=2), {"x": P(None, "cp")}, kwargs=inputs, attention="ring")
    torch.testing.assert_close(compiled.simulate(**inputs)[0], (4 * BATCH * model.out.bias.square()).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_dtype_is_near_to_a_wide_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact, inputs = Biased("of heads", 32).double(), draw(32)
    narrow = Biased("of heads", 32)
    narrow.load_state_dict(exact.state_dict())
    own = {name: value.to(dtype) for name, value in inputs.items()}
    wanted = torch.autograd.grad(exact(**inputs), list(exact.parameters()))
    compiled = compile(narrow.to(dtype), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=own, attention="ring")
    found = compiled.simulate(**own)[1].values()
    distances = [(a.double() - b).norm() for a, b in zip(found, wanted, strict=True)]
    assert max(distances) < max(each.norm() for each in wanted) * (1e-6 if dtype == torch.float32 else 0.02)


def step_on_ranks() -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallel = parallelize(Biased("of heads", 13), mesh, {"x": P("dp", "cp")}, attention="ring")
    inputs = draw(13, dtype=torch.float32)
    parallel(**inputs)
    traffic = parallel.shardc.conversion.comm.traffic[0]
    traffic.clear()
    loss = parallel(**inputs)
    loss.backward()
    announced = Counter[str]()
    for each in parallel.program.collectives:
        announced[each.kind] += each.wire_bytes
    return loss.detach(), [whole(parameter.grad) for parameter in parallel.parameters()], traffic.bytes, announced


def test_on_real_ranks_a_step_is_that_of_one_device_and_sends_what_is_announced(gloo: GlooPool) -> None:
    torch.manual_seed(0)
    model = Biased("of heads", 13)
    expected = model(**draw(13, dtype=torch.float32))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for loss, gradients, sent, announced in gloo.run(step_on_ranks):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        for own, gradient in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(own, gradient, rtol=0, atol=1e-5 * max(1.0, gradient.abs().max().item()))
        assert sent == announced
