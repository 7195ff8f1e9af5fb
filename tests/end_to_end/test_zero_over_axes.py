"""ZeRO over several axes, of which some are fast: hpZ and qgZ of ZeRO++."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from gpt import GPT, Config
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Compiled, Mesh, P, Pipeline, Precision, Remat, Zero
from shardc.language.errors import OptionError

BATCH = {"x": P(("node", "gpu"))}
HIERARCHY = Mesh(node=2, gpu=4)
TIED = {"blocks.0.0.weight": P(None, "gpu"), "blocks.2.2.bias": P("node")}  # the sum of its gradients is read cut
FAST: dict[str, Any] = {"axis": ("node", "gpu"), "gather_over": "gpu"}


class Tower(nn.Module):
    """Blocks of two layers with a residual; the last one's weight is the first one's too."""

    def __init__(self, width: int, hidden: int, is_tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in range(3)
        )
        if is_tied:
            self.blocks[2][0].weight = self.blocks[0][0].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def tower(size: tuple[int, int] = (16, 32), is_tied: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tower(*size, is_tied).double(), torch.randn(16, size[0]).double()


def compile_tower(size: tuple[int, int] = (16, 32), mesh: Mesh = HIERARCHY, **options: Any) -> Compiled:
    model, x = tower(size)
    return shardc.compile(model, mesh, BATCH, args=(x,), **options)


def wire_bytes(compiled: Compiled, axis: str) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for each in compiled.collectives:
        if axis in each.axes:
            found[each.phase, each.kind] += each.wire_bytes
    return found


MESHES = {
    "slow first": HIERARCHY,
    "fast first": Mesh(gpu=4, node=2),
    "three slow": Mesh(node=3, gpu=2),
    "with tp between": Mesh(node=2, tp=2, gpu=2),
    "with tp last": Mesh(node=2, gpu=2, tp=2),
    "one node": Mesh(node=1, gpu=4),
    "one a node": Mesh(node=4, gpu=1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "recomputed": {"remat": Remat("blocks.*")},
    "recomputed and sent again": {"remat": Remat("blocks.*", collectives=True)},
    "within a budget": {"remat": Remat(budget=20_000, collectives=True)},
    "each alone": {"bucket": 1},
    "in codes of their own values": {"wire": {"node": "bf16"}},
}


SIZES = {"even": (16, 32), "uneven": (13, 75), "short": (3, 5)}
CASES = [
    *((name, "stage 3", size) for name in MESHES for size in SIZES),
    *((name, options, "even") for name in ("fast first", "with tp between") for options in OPTIONS),
    *(("slow first", options, "uneven") for options in OPTIONS if "budget" not in options),
]


@pytest.mark.parametrize(("name", "options", "size"), CASES)
def test_gradients_are_those_of_one_device(name: str, options: str, size: str) -> None:
    mesh, settings = MESHES[name], dict(OPTIONS[options])
    model, x = tower(SIZES[size], is_tied=True)
    annotations = BATCH | ({"blocks.*.0.*": P("tp")} if "tp" in mesh.axis_names else {})
    zero = Zero(stage=settings.pop("stage", 3), **FAST)
    compiled = shardc.compile(model, mesh, annotations, args=(x,), zero=zero, **settings)
    loss, gradients = compiled.simulate(x)
    expected = model(x)
    expected.backward()
    atol = 1e-2 if "wire" in settings else 1e-12
    torch.testing.assert_close(loss, expected, atol=atol, rtol=0)
    for each, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[each], parameter.grad, atol=atol, rtol=0)


def test_slow_links_carry_a_piece_of_each_parameter_once_and_a_piece_of_each_gradient() -> None:
    total = sum(parameter.nbytes for parameter in tower()[0].parameters())
    piece = total // 4  # what the ranks of a node hold together is all, so that each brings in as much
    compiled = compile_tower(zero=Zero(**FAST))
    over_nodes = wire_bytes(compiled, "node")
    loss = over_nodes.pop(("forward", "all_reduce"))
    assert loss < 32
    assert over_nodes == {("forward", "all_gather"): piece // 2, ("backward", "reduce_scatter"): piece // 2}
    in_one_step = wire_bytes(compile_tower(zero=Zero(("node", "gpu"), 3)), "node")
    assert in_one_step["forward", "all_gather"] == total * 7 // 8
    assert in_one_step["backward", "all_gather"] == 5 * 16 * 32 * 8 * 7 // 8  # all weights but the first
    assert in_one_step["backward", "reduce_scatter"] == total * 7 // 8
    within = wire_bytes(compiled, "gpu")
    assert within["forward", "all_gather"] == within["backward", "reduce_scatter"] == total * 3 // 4


def test_nodes_send_codes_as_in_zero_plus_plus() -> None:
    """At most 0.75 of 3, says ZeRO++ of values of two bytes, where all are gathered twice and reduced once."""
    model, x = tower((256, 512))
    sent = []
    for codes in (None, {"node parameters": "int8", "node gradients": "int4"}):
        options: dict[str, Any] = {"zero": Zero(**FAST), "wire": codes}
        found = wire_bytes(shardc.compile(model.float(), HIERARCHY, BATCH, args=(x.float(),), **options), "node")
        sent.append((found["forward", "all_gather"], sum(found.values()) - found["forward", "all_reduce"]))
    (gather, before), (_, after) = sent
    assert before == 2 * gather  # hpZ has none in backward
    assert after <= gather * (0.27 + 0.14)


def test_what_was_gathered_is_saved_and_counted() -> None:
    (model, x), sizes = tower(), {}
    for name, zero in {"in one step": Zero(("node", "gpu"), 3), "halfway": Zero(**FAST)}.items():
        compiled = shardc.compile(model, HIERARCHY, BATCH, args=(x,), zero=zero)
        sizes[name] = compiled.memory
        assert compiled.memory["parameters"] == sum(each.nbytes for each in model.parameters()) // 8
    read = [each for name, each in model.named_parameters() if name.endswith("weight") and name != "blocks.0.0.weight"]
    more = sizes["halfway"]["saved"] - sizes["in one step"]["saved"]
    assert more == sum(weight.nbytes // 4 for weight in read)
    assert sizes["halfway"]["peak"] - sizes["in one step"]["peak"] <= 2 * more + 4096


@pytest.mark.parametrize("remat", [Remat("blocks.*", collectives=True), Remat(budget=14_000, collectives=True)])
def test_no_piece_is_gathered_again_where_other_results_of_collectives_are(remat: Remat) -> None:
    again = wire_bytes(compile_tower(zero=Zero(**FAST), remat=remat), "node")
    assert not again["backward", "all_gather"]


def test_collectives_of_both_steps_go_together() -> None:
    counts = Counter((each.phase, each.kind, *each.axes) for each in compile_tower(zero=Zero(**FAST)).collectives)
    assert counts["backward", "reduce_scatter", "gpu"] == counts["backward", "reduce_scatter", "node"] == 1
    assert counts["forward", "all_gather", "gpu"] == counts["forward", "all_gather", "node"] == 3  # a block's


@pytest.mark.parametrize("bucket", [300, 1000, 3000, 10_000])
@pytest.mark.parametrize(("stage", "wire"), [(2, None), (3, None), (3, {"node": "bf16", "gpu parameters": "bf16"})])
def test_buckets_of_both_steps_are_of_any_size(stage: Any, wire: dict[str, str | None] | None, bucket: int) -> None:
    model, x = tower(SIZES["uneven"], is_tied=True)
    annotations = BATCH | {"blocks.*.0.*": P("tp")}
    options: dict[str, Any] = {"zero": Zero(stage=stage, **FAST), "bucket": bucket, "wire": wire}
    compiled = shardc.compile(model, MESHES["with tp last"], annotations, args=(x,), **options)
    _, gradients = compiled.simulate(x)
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-2 if wire else 1e-12, rtol=0)


@pytest.mark.parametrize("zero", [Zero(**FAST), Zero("gpu", 3)], ids=["in two steps", "in one"])
@pytest.mark.parametrize("names", ["gpu dp node", "dp gpu node", "gpu node dp", "node gpu dp"])
def test_sums_over_axes_of_three_kinds_come_in_their_order(names: str, zero: Zero) -> None:
    sizes = {"gpu": 2, "dp": 2, "node": 3}
    torch.manual_seed(0)
    model, x = Tower(8, 24).double(), torch.randn(24, 8).double()
    annotations = {"x": P(("node", "gpu", "dp")), "blocks.0.0.weight": P("node")}
    mesh = Mesh(**{name: sizes[name] for name in names.split()})
    _, gradients = shardc.compile(model, mesh, annotations, args=(x,), zero=zero).simulate(x)
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=0)


def test_an_axis_of_gather_over_cuts_too_and_a_pipeline_gathers_once() -> None:
    short = compile_tower(zero=Zero("node", 3, gather_over="gpu"))
    assert str(short.shardings) == str(compile_tower(zero=Zero(**FAST)).shardings)
    model, x = tower()
    mesh, pipeline = Mesh(pp=2, node=2, gpu=2), Pipeline("pp", microbatches=4, cuts=("blocks.1",))
    staged = shardc.compile(model, mesh, BATCH, args=(x,), zero=Zero(**FAST), pipeline=pipeline)
    loss, gradients = staged.simulate(x)
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "annotations", "zero"),
    [
        ({"node": 3, "tp": 2, "gpu": 2}, {"blocks.0.2.weight": P("node")}, Zero(("tp", "gpu", "node"), 3)),
        ({"node": 2, "tp": 2, "gpu": 2}, {"blocks.1.0.weight": P("gpu")}, Zero(**FAST)),
        ({"node": 2, "gpu": 2}, {"x": P("gpu"), **TIED}, Zero("node", 3)),
    ],
    ids=["an axis not of the batch", "weights cut by a fast axis", "a tied weight cut by the batch's"],
)
def test_no_reshard_of_a_pipeline_cuts_by_microbatches(
    sizes: dict[str, int], annotations: dict[str, P], zero: Zero
) -> None:
    torch.manual_seed(0)
    model, x = Tower(12, 30, is_tied=True).double(), torch.randn(12, 12).double()
    options: dict[str, Any] = {"zero": zero, "pipeline": Pipeline("pp", microbatches=2)}
    compiled = shardc.compile(model, Mesh(pp=2, **sizes), BATCH | annotations, args=(x,), **options)
    _, gradients = compiled.simulate(x)
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bucket", [1000, 4000, 2**20])
def test_sums_in_codes_wait_for_sums_of_other_buckets(bucket: int) -> None:
    model = GPT(Config(layers=2, vocab=24, context=16, width=16, heads=4))
    torch.manual_seed(0)
    ids = torch.randint(24, (8, 8))
    annotations = {
        "ids": P(("gpu", "node")), "targets": P(("gpu", "node")), "blocks.*.norm1.*": P("tp"),
        "blocks.0.attn.qkv.weight": P(None, "tp"),
    }  # fmt: skip
    options: dict[str, Any] = {"zero": Zero(("tp", "gpu"), 3), "wire": {"gradients": "bf16"}, "bucket": bucket}
    compiled = shardc.compile(model, Mesh(node=2, gpu=2, tp=2), annotations, args=(ids, ids), **options)
    _, gradients = compiled.simulate(ids, ids)
    model(ids, ids).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-2, rtol=2e-2, msg=name)


def test_a_gpt_in_bfloat16_computes_what_it_does_in_one_step() -> None:
    model = GPT(Config(layers=2, vocab=96, context=32, width=32, heads=4))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(96, (8, 16))
    given: dict[str, Any] = {"args": (ids, ids), "precision": Precision(), "strict": True}
    annotations = {"ids": P(("node", "gpu")), "targets": P(("node", "gpu"))}
    results = [
        shardc.compile(model, HIERARCHY, annotations, zero=zero, **given).simulate(ids, ids)
        for zero in (Zero(("node", "gpu"), 3), Zero(**FAST))
    ]
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def trained(mesh: Any, stage: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    model, _ = tower(SIZES["uneven"], is_tied=True)
    parallel = shardc.parallelize(model, mesh, BATCH, zero=Zero(stage=stage, **FAST))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = parallel(torch.randn(16, SIZES["uneven"][0]).double())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: whole(each).detach().clone() for name, each in parallel.named_parameters()}


def trained_on_ranks(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    return trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu")), stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_processes_train_as_one_device(gloo: GlooPool, stage: int) -> None:
    losses, parameters = trained(Mesh(node=1, gpu=1), stage)
    virtual = trained(Mesh(node=2, gpu=2), stage)
    for found, values in (virtual, *gloo.run(trained_on_ranks, stage)):
        assert found == pytest.approx(losses, abs=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(OptionError, match=r"gather_over='dp'\n.*no axis is left.*\n.*slow links"):
        Zero("dp", 3, gather_over="dp")
    with pytest.raises(OptionError, match=r"Zero\(\('node', 'gpo'\)\).*\n.*no such axis\n.*did you mean gpu"):
        compile_tower(zero=Zero(("node", "gpo")))
    with pytest.raises(OptionError, match="Pipeline(.|\n)*held by the ranks of one stage"):
        compile_tower(zero=Zero(**FAST), pipeline=Pipeline("node", 2))
    assert Zero(["node", "gpu"], 2) == Zero(("node", "gpu"), 2)  # type: ignore[arg-type]
    assert Zero(**FAST).text == "Zero(axis=('node', 'gpu'), stage=3, gather_over='gpu')"
