"""Attention whose positions are cut by more ranks than share its heads: some share heads, the others are a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attending import Attending, check_compiled, check_step, draw, kinds_sent
from gloo_pool import GlooPool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import shardc
from shardc import Mesh, P, Pipeline, Remat, Zero, compile
from shardc.api import Compiled
from shardc.language.errors import ShardingError
from shardc.program.communication import ring_of

TOLERANCE = 1e-10
MIXED = ["all_to_all"] * 3 + ["ring_attention", "all_to_all"]


def rings(compiled: Compiled) -> set[int]:
    """The numbers of chunks of the rings."""
    found = map(ring_of, compiled.program.calls)
    return {ring.count for ring in found if ring is not None}


def test_ranks_share_heads_in_groups_and_keys_go_round_the_others() -> None:
    """Bytes are those of both: half of what a rank has of queries, keys and values, and a chunk of keys."""
    model = Attending(heads=4, num_keys=2).double()
    compiled = check_step(model, Mesh(cp=4), draw(32), TOLERANCE)
    assert kinds_sent(compiled) == MIXED
    assert kinds_sent(compiled, "backward").count("ring_attention_backward") == 1
    head, rows = 2 * 6 * 8, 32  # bytes of a row of one head of both samples
    sent = dict.fromkeys(("forward", "backward"), 0)
    for each in compiled.collectives:
        if each.kind in ("all_to_all", "collective_permute"):
            sent[each.phase] += each.wire_bytes
    to_heads = (4 + 2 + 2 + 4) * head * rows // 4 // 2
    in_ring = 2 * head * rows // 2  # a head of keys and one of values, of half of the positions
    assert sent == {"forward": to_heads + in_ring, "backward": to_heads + 2 * in_ring}
    assert rings(compiled) == {2}


def test_an_explanation_says_that_neighbours_share_heads() -> None:
    compiled = compile(
        Attending(heads=4, num_keys=2), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(32, dtype=torch.float32)
    )
    sent = [each.name for each in compiled.collectives if each.kind == "all_to_all" and each.phase == "forward"]
    reasons = [{reason.kind for reason in compiled.explain(name).reasons} for name in sent]
    assert reasons == [{"heads"}, {"heads"}, {"heads"}, {"positions"}]
    assert "has it whole" not in str(compiled.explain(sent[0]))


@settings(max_examples=10, deadline=None)
@given(
    shape=st.sampled_from([(4, 2), (2, 2), (2, 1), (8, 4), (8, 2), (6, 2)]),
    ranks=st.sampled_from([4, 6, 8, 12]),
    is_causal=st.booleans(),
    way=st.sampled_from(["auto", "ulysses", "ring"]),
    scale=st.sampled_from([None, 0.3]),
)
def test_numbers_are_those_of_one_device(
    shape: tuple[int, int], ranks: int, is_causal: bool, way: str, scale: float | None
) -> None:
    heads, num_keys = shape
    model = Attending(heads, num_keys, is_causal, scale).double() if 24 % heads == 0 else None
    if model is None or (way == "ulysses" and num_keys == 1):
        return
    check_step(model, Mesh(cp=ranks), draw(48), TOLERANCE, attention=way)


def test_ulysses_moves_to_heads_what_heads_can_take() -> None:
    for num_keys, chunks in ((4, {2}), (2, {4})):
        model = Attending(heads=4, num_keys=num_keys).double()
        compiled = check_step(model, Mesh(cp=8), draw(32), TOLERANCE, attention="ulysses")
        assert rings(compiled) == chunks
    with pytest.raises(ShardingError, match="cannot share the heads"):
        compile(Attending(4, 1).double(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(32), attention="ulysses")


def test_two_axes() -> None:
    """Ranks of the minor axis, those of a node, share heads."""
    model = Attending(heads=4, num_keys=2).double()
    compiled = compile(model, Mesh(node=2, gpu=2), {"x": P(None, ("node", "gpu"))}, kwargs=draw(32))
    check_compiled(compiled, model, draw(32), TOLERANCE)
    axes = {each.kind: each.axes for each in compiled.collectives if each.kind != "all_reduce"}
    assert axes == {"all_to_all": ("gpu",), "collective_permute": ("node",)}


@pytest.mark.parametrize("mesh", [Mesh(dp=2, cp=4), Mesh(tp=2, cp=4)], ids=str)
@pytest.mark.parametrize("zero", [None, 3])
def test_with_other_axes(mesh: Mesh, zero: int | None) -> None:
    is_tp = "tp" in mesh.axis_names
    heads = {f"{name}.weight": P("tp", None) for name in "qkv"} | {f"{name}.bias": P("tp") for name in "qkv"}
    options: dict[str, Any] = {"annotations": heads | {"out.weight": P(None, "tp")}} if is_tp else {}
    options |= {"zero": Zero("cp", zero)} if zero else {}
    model = Attending(heads=8 if is_tp else 4, num_keys=4 if is_tp else 2).double()
    compiled = check_step(model, mesh, draw(32), TOLERANCE, remat=Remat("*") if zero else None, **options)
    assert rings(compiled) == {2}


@pytest.mark.parametrize("axes", [("cp", "tp"), ("tp", "cp")], ids="-".join)
@pytest.mark.parametrize("way", ["auto", "ulysses"])
def test_heads_that_are_cut_by_another_axis_are_shared_further(way: str, axes: tuple[str, str]) -> None:
    """By all ranks that share the positions: no rank computes what another does."""
    heads = {f"{name}.weight": P("tp", None) for name in "qkv"} | {f"{name}.bias": P("tp") for name in "qkv"}
    given: dict[str, Any] = {"annotations": heads | {"out.weight": P(None, "tp")}}
    model, mesh = Attending(heads=8, num_keys=8).double(), Mesh(**dict.fromkeys(axes, 2))
    for samples in (1, 2):
        inputs = {name: x[:samples] for name, x in draw(16).items()}
        compiled = check_step(model, mesh, inputs, TOLERANCE, attention=way, **given)
        moved = [each for each in kinds_sent(compiled) if each != "all_reduce"]
        assert moved == ["all_to_all"] * 4
        assert "all_gather" not in kinds_sent(compiled, "backward")
        assert compiled.cost.flops == compiled.recompile(attention="ring").cost.flops


def test_lengths_that_do_not_divide_are_a_ring_of_all() -> None:
    compiled = check_step(Attending(heads=4, num_keys=2).double(), Mesh(cp=4), draw(30), TOLERANCE)
    assert rings(compiled) == {4}


class Dropping(Attending):
    """With dropout."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)


def test_dropout_drops_the_same() -> None:
    model, inputs = Dropping(heads=4, num_keys=2).double(), draw(32)
    alone = compile(model, Mesh(one=1), {}, kwargs=inputs).simulate(**inputs)
    compiled = compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    loss, gradients = compiled.simulate(**inputs)
    assert rings(compiled) == {2}
    torch.testing.assert_close(loss, alone[0], rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in alone[1].items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=0, atol=TOLERANCE * max(1.0, gradient.abs().max().item())
        )


class Padded(Attending):
    """``mask``: which keys there are, ``[batch, positions]``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return scaled_dot_product_attention(q, k, v, mask[:, None, None], enable_gqa=True)


@pytest.mark.parametrize("cut", [None, "cp"])
def test_padding_is_hidden(cut: str | None) -> None:
    model, inputs = Padded(heads=4, num_keys=2).double(), draw(32)
    inputs["mask"] = torch.arange(32) < torch.tensor([[32], [19]])
    cuts = {"x": P(None, "cp"), "mask": P(None, cut)}
    compiled = compile(model, Mesh(cp=4), cuts, kwargs=inputs)
    check_compiled(compiled, model, inputs, TOLERANCE)
    assert rings(compiled) == {2}


def sent(compiled: Compiled) -> int:
    return sum(each.wire_bytes * each.times for each in compiled.collectives)


class Segmented(Attending):
    """``mask``: the number of the text of each position, ``[batch, positions]``; made a causal mask within texts."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        position = torch.arange(q.shape[2])
        seen = (mask[:, None, :, None] == mask[:, None, None]) & (position <= position.unsqueeze(1))
        return scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


@pytest.mark.parametrize("num_keys", [2, 4])
def test_ranks_that_share_heads_make_masks_in_pieces(num_keys: int) -> None:
    """Of all heads and positions; nobody sends positions, or a mask."""
    model, inputs = Segmented(heads=4, num_keys=num_keys).double(), draw(32)
    inputs["mask"] = torch.arange(32) // torch.tensor([[9], [17]])
    found = [compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention=way) for way in ("auto", "ring")]
    check_compiled(found[0], model, inputs, TOLERANCE)
    assert rings(found[0]) == {4 // num_keys} and rings(found[1]) == {4} and sent(found[0]) < sent(found[1])
    assert kinds_sent(found[0]) == (MIXED if num_keys == 2 else ["all_to_all"] * 4)


class Biased(Attending):
    """``mask``: numbers that are added to the scores of each key, ``[positions]``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return scaled_dot_product_attention(q, k, v, mask.expand(1, 1, 1, -1), enable_gqa=True)


def test_keys_that_are_gathered_are_so_among_the_groups() -> None:
    model, inputs = Biased(heads=4, num_keys=4).double(), draw(32)
    inputs["mask"] = torch.randn(32, dtype=torch.float64)
    found = [compile(model, Mesh(cp=8), {"x": P(None, "cp")}, kwargs=inputs, attention=way) for way in ("auto", "ring")]
    check_compiled(found[0], model, inputs, TOLERANCE)
    assert rings(found[0]) == {2} and sent(found[0]) < sent(found[1])


class Wide(nn.Module):
    """Values of a larger head size than keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = (16, 2, 2)
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (32, 4, 64))

    def forward(self, x: Tensor) -> Tensor:
        each = zip(self.layers, self.heads, strict=True)
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in each)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().sum()


def test_results_count_as_well() -> None:
    inputs = {"x": torch.randn(2, 32, 16)}
    auto, ring = (
        compile(Wide(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention=w) for w in ("auto", "ring")
    )
    assert sent(auto) <= sent(ring)


def test_an_error_names_what_does_not_divide() -> None:
    model = Attending(4, 2).double()
    with pytest.raises(ShardingError, match="30 queries and 30 keys"):
        compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(30), attention="ulysses")
    with pytest.raises(ShardingError, match="last of the axes"):
        compile(model, Mesh(a=2, b=3), {"x": P(None, ("a", "b"))}, kwargs=draw(48), attention="ulysses")


class Deep(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner(heads=4, num_keys=2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


class Inner(Attending):
    """Attention that returns what it computes."""

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        each = ((self.q, self.heads), (self.k, self.num_keys), (self.v, self.num_keys))
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in each)
        out: Tensor = self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


def test_in_a_pipeline() -> None:
    model, inputs = Deep().double(), draw(32)
    pipeline = Pipeline(microbatches=2)
    compiled = compile(model, Mesh(pp=2, cp=4), {"x": P(None, "cp")}, kwargs=inputs, pipeline=pipeline)
    check_compiled(compiled, model, inputs, TOLERANCE)
    assert rings(compiled) == {2}


def _on_ranks(way: str) -> None:
    torch.manual_seed(0)
    model, inputs = Deep().double(), draw(32)
    expected = model(**inputs)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    parallel = shardc.parallelize(model, mesh, {"x": P(None, "cp")}, kwargs=inputs, attention=way)
    loss = parallel(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for parameter, gradient in zip(parallel.parameters(), wanted, strict=True):
        found = parameter.grad
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(whole, gradient, rtol=0, atol=TOLERANCE * max(1.0, gradient.abs().max().item()))
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(**inputs), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["auto", "ulysses"])
def test_on_ranks(way: str, gloo: GlooPool) -> None:
    gloo.run(_on_ranks, way)
