"""Well-known plans: the number and kind of collectives that a few annotations give."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import gpt
import pytest
import torch
from cases import few
from gpt import DATA, GPT, Config, gpt_sequence
from one_device import equals_one_device

import shardc
from shardc import Mesh, P

LAYERS = 3
ROW = {"*.attn.proj.weight": P(None, "tp"), "*.mlp.down.weight": P(None, "tp")}
COLUMN_FUSED = {"*.attn.qkv.weight": P("tp"), "*.mlp.up.weight": P("tp")}
COLUMN_SEPARATE = {"*.attn.q.weight": P("tp"), "*.mlp.up.weight": P("tp")}


def compile_gpt(mesh: Mesh, annotations: Mapping[str, P], batch: int = 8, **sizes: Any) -> shardc.Compiled:
    with torch.device("meta"):
        model = GPT(Config(layers=LAYERS, **sizes))
        ids = torch.empty(batch, model.config.context, dtype=torch.int64)
    return shardc.compile(model, mesh, annotations, args=(ids, ids))


def collectives(compiled: shardc.Compiled) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(compiled.dump(format="json"))["collectives"]
    return found


def count_on(axis: str, compiled: shardc.Compiled) -> Counter[tuple[str, str]]:
    return Counter((each["kind"], each["phase"]) for each in collectives(compiled) if axis in each["axes"])


@pytest.mark.parametrize(
    ("annotations", "fused"),
    [(ROW, True), (COLUMN_FUSED, True), (ROW, False), (COLUMN_SEPARATE, False)],
    ids=["row weights of a fused qkv", "column weights of a fused qkv", "row weights", "column weights"],
)
@pytest.mark.parametrize("tied", few([False, True], False), ids=["head", "tied head"])
def test_two_weight_annotations_a_block_give_two_and_two_all_reduces_a_layer(
    annotations: dict[str, P], fused: bool, tied: bool
) -> None:
    compiled = compile_gpt(Mesh(dp=2, tp=4), DATA | annotations, fused=fused, tied=tied)
    expected = {("all_reduce", "forward"): 2 * LAYERS, ("all_reduce", "backward"): 2 * LAYERS}
    assert count_on("tp", compiled) == expected
    moved = [each for each in collectives(compiled) if each["axes"] == ["dp"] and each["phase"] == "forward"]
    assert all(each["bytes"] <= 8 for each in moved), "data parallelism moves two numbers in the forward, no activation"


@pytest.mark.parametrize(
    ("mesh", "fused", "annotated"),
    [
        (Mesh(tp=4), True, "module:tokens"),
        (Mesh(dp=2, tp=4), True, "module:*norm*"),
        (Mesh(dp=2, tp=4), False, "module:tokens"),
    ],
)
def test_one_more_annotation_is_sequence_parallel_with_four_gathers_and_four_reduce_scatters_a_layer(
    mesh: Mesh, fused: bool, annotated: str
) -> None:
    data, batch = (DATA, "dp") if "dp" in mesh.axis_names else ({}, None)
    compiled = compile_gpt(mesh, data | ROW | {annotated: P(batch, "tp")}, fused=fused)
    shape = [8 // (2 if batch else 1), 32, 64]
    found = Counter(
        (each["kind"], each["phase"])
        for each in collectives(compiled)
        if shape in (each["local_shape_in"], each["local_shape_out"])
    )
    assert found == dict.fromkeys(product(("all_gather", "reduce_scatter"), ("forward", "backward")), 2 * LAYERS)
    others = [each for each in collectives(compiled) if each["kind"] not in ("all_gather", "reduce_scatter")]
    assert all(each["kind"] == "all_reduce" for each in others)
    assert all(each["phase"] == "backward" or each["bytes"] <= 8 for each in others), "sums of parameters' gradients"
    flops = json.loads(compiled.dump(format="json"))["flops"]
    assert flops["per_rank"] * mesh.size == flops["whole"]


def test_sequence_parallel_equals_one_device() -> None:
    model, args, kwargs, annotations = gpt_sequence(Mesh(dp=2, tp=2))
    compiled = shardc.compile(model.double(), Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    equals_one_device(compiled, *args)


def test_a_plain_cut_of_a_fused_weight_becomes_a_cut_of_each_block_and_the_dump_says_so() -> None:
    compiled = compile_gpt(Mesh(tp=2), {"*.attn.qkv.weight": P("tp")})
    assert str(compiled.shardings["blocks.0.attn.qkv.weight"]) == "[(_ 64@tp), _]"
    assert "blocks.0.attn.qkv.weight: *.attn.qkv.weight: P('tp') cuts each block" in compiled.dump()


def test_q_k_and_v_are_inferred_from_the_attention_output() -> None:
    compiled = compile_gpt(Mesh(dp=2, tp=4), DATA | {"*.attn.proj.weight": P(None, "tp")}, fused=False)
    assert {str(compiled.shardings[f"blocks.0.attn.{name}.weight"]) for name in "qkv"} == {"[_@tp, _]"}
    assert {str(compiled.shardings[f"blocks.0.attn.{name}.bias"]) for name in "qkv"} == {"[_@tp]"}


@pytest.mark.parametrize("batch", few([4, 8, 64, 1024], 4, 64))
def test_parameters_cut_over_the_data_axis_are_gathered_and_their_gradients_scattered(batch: int) -> None:
    compiled = compile_gpt(Mesh(dp=4), DATA | {"param:*": P("dp")}, batch=batch)
    found = collectives(compiled)
    size = sum(4 * parameter.numel() for parameter in compiled.model.parameters())
    for kind in ("all_gather", "reduce_scatter"):
        assert sum(each["bytes"] for each in found if each["kind"] == kind) == size
    assert Counter(each["kind"] for each in found if each["bytes"] > 8) == {
        "all_gather": LAYERS + 2,  # embeddings, each layer, the last norm and the head
        "reduce_scatter": 1,
    }
    small = [each for each in found if each["bytes"] <= 8]
    assert [each["bytes"] for each in small] == [4, 4], "the number of targets, and the loss"


def test_a_partial_sum_of_attention_and_mlp_is_added_before_it_is_reduced() -> None:
    class Parallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
            self.gate, self.out = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.down(self.up(x).relu()) + self.out(self.gate(x).tanh())
            return x.square().sum()

    compiled = shardc.compile(
        Parallel(), Mesh(tp=2), {"down.weight": P(None, "tp"), "out.weight": P(None, "tp")}, args=(torch.randn(4, 8),)
    )
    assert [(each.kind, each.phase) for each in compiled.collectives] == [("all_reduce", "forward")]


class ParallelBlock(torch.nn.Module):
    """GPT-J's: attention and MLP read one norm, and both are added to the residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = torch.nn.LayerNorm(config.width), gpt.Attention(config), gpt.MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attn(h) + self.mlp(h)


@pytest.mark.parametrize("fused", [True, False], ids=["fused qkv", "q, k, v"])
@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(dp=2, tp=4)], ids=["1-D", "2-D"])
def test_parallel_attention_and_mlp_give_one_and_one_all_reduce_a_layer(mesh: Mesh, fused: bool) -> None:
    torch.manual_seed(0)
    config = Config(layers=LAYERS, fused=fused)
    model = GPT(config)
    model.blocks = torch.nn.ModuleList(ParallelBlock(config) for _ in range(LAYERS))
    ids = torch.randint(config.vocab, (8, config.context))
    data = DATA if "dp" in mesh.axis_names else {}
    compiled = shardc.compile(model.double(), mesh, data | ROW, args=(ids, ids))
    assert count_on("tp", compiled) == {("all_reduce", "forward"): LAYERS, ("all_reduce", "backward"): LAYERS}
    equals_one_device(compiled, ids, ids)


class GroupedQueries(torch.nn.Module):
    """8 heads of queries, 2 of keys and values; both may be rotated by their positions."""

    def __init__(self, width: int = 4, rotate: Callable[[torch.Tensor], torch.Tensor] = lambda heads: heads) -> None:
        super().__init__()
        self.width, self.rotate = width, rotate
        self.q, self.out = (torch.nn.Linear(8 * width, 8 * width, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(8 * width, 2 * width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.parametrize(("ranks", "keys"), [(2, "[_@tp, _]"), (4, "[_, _]"), (8, "[_, _]")])
def test_heads_of_queries_are_cut_over_more_ranks_than_there_are_heads_of_keys(ranks: int, keys: str) -> None:
    torch.manual_seed(0)
    model, x = GroupedQueries().double(), torch.randn(2, 6, 32, dtype=torch.float64)
    compiled = shardc.compile(model, Mesh(tp=ranks), {"out.weight": P(None, "tp")}, args=(x,))
    assert str(compiled.shardings["q.weight"]) == "[_@tp, _]"
    assert str(compiled.shardings["k.weight"]) == keys, "a parameter is cut by whole axes, which DTensor can say"
    assert not any(compiled.at("propagate").rule(node).is_fallback for node in compiled.at("propagate").calls)
    _, gradients = compiled.simulate(x)
    for (name, _), expected in zip(
        model.named_parameters(), torch.autograd.grad(model(x), list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-10)


def rotated_halves(heads: torch.Tensor) -> torch.Tensor:
    """Heads of 8 elements as Llama rotates them: the second half with the first."""
    positions = torch.arange(heads.shape[-2], dtype=heads.dtype)
    angles = (positions[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 2)
    first, second = heads[..., :4], heads[..., 4:]
    return heads * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(tp=8), Mesh(dp=2, tp=8)], ids=str)
def test_columns_are_cut_over_more_ranks_than_there_are_heads_of_keys(mesh: Mesh) -> None:
    """Gradients of their input are summed over tp for queries, over two parts of tp for keys, and reduced together."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), GroupedQueries(8, rotated_halves)).double()
    x, cut = torch.randn(8, 16, 64, dtype=torch.float64), {f"1.{name}.weight": P("tp") for name in "qkv"}
    data = {"input": P("dp")} if "dp" in mesh.axis_names else {}
    compiled = shardc.compile(model, mesh, cut | data, args=(x,))
    equals_one_device(compiled, x)
    assert count_on("tp", compiled)["all_reduce", "backward"] == 1


def unbound_view(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.view(*qkv.shape[:2], 3, 4, -1).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2)


def batched_heads(qkv: torch.Tensor) -> torch.Tensor:
    b, t = qkv.shape[:2]
    q, k, v = (part.view(b, t, 4, -1).transpose(1, 2).reshape(b * 4, t, -1) for part in qkv.chunk(3, -1))
    scores = torch.baddbmm(torch.zeros(b * 4, t, t), q, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(scores, v).view(b, 4, t, -1).transpose(1, 2).reshape(b, t, -1)


def masked(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    mask = torch.full((qkv.shape[1],) * 2, -torch.inf).triu(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Attention(torch.nn.Module):
    """Attention in a spelling of its own, with a residual around it."""

    def __init__(self, spelling: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.spelling = spelling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() + self.out(self.spelling(self.qkv(self.norm(x.tanh()))))).square().sum()


@pytest.mark.parametrize("spelling", [unbound_view, batched_heads, masked])
@pytest.mark.parametrize("annotation", [{"out.weight": P(None, "tp")}, {"qkv.weight": P("tp")}], ids=["row", "column"])
def test_every_spelling_of_attention_needs_one_all_reduce_each_way(
    spelling: Callable[[torch.Tensor], torch.Tensor], annotation: dict[str, P]
) -> None:
    torch.manual_seed(0)
    model, x = Attention(spelling), torch.randn(4, 6, 16, requires_grad=True)
    compiled = shardc.compile(model, Mesh(dp=2, tp=2), {"x": P("dp"), **annotation}, args=(x,))
    assert count_on("tp", compiled) == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 1}
    loss, gradients = compiled.simulate(x)
    torch.testing.assert_close(loss, model(x).detach())
    torch.testing.assert_close(gradients["x"], torch.autograd.grad(model(x), x)[0], rtol=1e-4, atol=1e-5)
