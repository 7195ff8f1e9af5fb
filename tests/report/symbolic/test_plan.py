"""Costs as functions of sizes equal those of a fresh compilation wherever the plan is valid."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attending import WIDTH, Attending
from gpt import DATA, GPT, MEGATRON, Config
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P, Zero
from shardc.cli.main import main
from shardc.report.symbolic.form import Fitter, Point, Widening
from shardc.report.symbolic.plan import Repeated, SymbolicPlan, symbolic_plan
from shardc.report.symbolic.symbolic_program import value


class Tower(nn.Module):
    """Blocks of two layers with a residual, ``width`` wide and ``hidden`` within."""

    def __init__(self, layers: int, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, torch.ones_like(x))


def tower(annotations: dict[str, P], **options: Any) -> Callable[[Point], shardc.Compiled]:
    def compile_(point: Point) -> shardc.Compiled:
        with torch.device("meta"):
            model, x = Tower(point["L"], point["d"], point["h"]), torch.empty(point["B"], point["d"])
        mesh = Mesh(dp=point["dp"], tp=point["tp"])
        return shardc.compile(model, mesh, annotations, args=(x,), **options)

    return compile_


class Images(nn.Module):
    """Convolutions and a pool that halve the height twice, a shift, and a mean over all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 5, padding=2), nn.Conv2d(width, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        return self.last(x + x.roll(1, 2)).square().mean()


def images(point: Point) -> shardc.Compiled:
    with torch.device("meta"):
        model, x = Images(point["d"]), torch.empty(point["B"], 3, point["H"], 16)
    return shardc.compile(model, Mesh(dp=point["dp"], tp=point["tp"]), {"x": P("dp", None, "tp")}, args=(x,))


def staged(point: Point) -> shardc.Compiled:
    with torch.device("meta"):
        model, x = Tower(4, point["d"], point["h"]), torch.empty(point["B"], point["d"])
    mesh = Mesh(dp=point["dp"], tp=point["tp"], pp=point["pp"])
    return shardc.compile(model, mesh, ROWS, args=(x,), pipeline=shardc.Pipeline(microbatches=4))


def gpt(point: Point) -> shardc.Compiled:
    with torch.device("meta"):
        model = GPT(Config(layers=point["L"], vocab=96, context=CONTEXT, width=point["d"], heads=4))
        ids = torch.empty(point["B"], point["T"], dtype=torch.int64)
    return shardc.compile(model, Mesh(dp=point["dp"], tp=point["tp"]), DATA | MEGATRON, args=(ids, ids))


def ring(point: Point, axis: str = "cp") -> shardc.Compiled:
    with torch.device("meta"):
        model, x = Attending(), torch.empty(point["B"], point["T"], WIDTH)
    cut = {"x": P("dp", axis)}
    return shardc.compile(model, Mesh(dp=point["dp"], cp=point["cp"]), cut, args=(x,), attention="ring")


def shared_heads(point: Point) -> shardc.Compiled:
    """Positions over eight ranks, of which groups of four share heads."""
    with torch.device("meta"):
        model, x = Attending(), torch.empty(point["B"], point["T"], WIDTH)
    mesh, cut = Mesh(dp=point["dp"], cp=point["cp"]), {"x": P("dp", "cp")}
    return shardc.compile(model, mesh, cut, args=(x,), attention="ulysses")


pytestmark = pytest.mark.xdist_group("symbols")  # who shares what is made once
CONTEXT = 8192
ROWS = {"x": P("dp"), "*.2.weight": P(None, "tp")}
TOWER = {"dp": 2, "tp": 2, "L": 3, "B": 16, "d": 12, "h": 40}
CASES = {
    "megatron": (tower(ROWS), TOWER, 14),
    "stored in pieces": (tower(ROWS, zero=Zero("dp", 3)), TOWER, 13),
    "each alone, states in pieces": (tower(ROWS, zero=Zero("dp", 1), bucket=1), TOWER, 12),
    "gpt": (gpt, {"dp": 2, "tp": 2, "L": 2, "B": 8, "T": 24, "d": 32}, 2),
    "edges of images": (images, {"dp": 2, "tp": 2, "B": 4, "H": 32, "d": 6}, 5),
    "shared heads": (shared_heads, {"dp": 2, "cp": 8, "B": 4, "T": 48}, 3),
    "a ring": (ring, {"dp": 2, "cp": 4, "B": 4, "T": 48}, 3),
    "zigzag": (functools.partial(ring, axis="cp:zigzag"), {"dp": 2, "cp": 4, "B": 4, "T": 48}, 3),
    "a pipeline": (staged, {"dp": 2, "tp": 2, "pp": 2, "B": 16, "d": 12, "h": 40}, 5),
}


@functools.cache
def plan_of(name: str) -> SymbolicPlan:
    compile_, reference, _ = CASES[name]
    axes = [name for name in reference if name in ("dp", "tp", "cp", "pp")]
    return symbolic_plan(compile_, reference, axes, Repeated("L", "blocks") if "L" in reference else None)


def points(plan: SymbolicPlan, count: int, seed: int) -> list[Point]:
    """Random points inside of the region, the sizes of models and of meshes far apart."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        point: dict[str, int] = {axis: draw.choice([2, 2, 4, 4, 3, 6, 8, 32, 256, 8192]) for axis in plan.axes}
        point |= {
            axis: size for axis, size in plan.reference.items() if plan.region.low[axis] == plan.region.high[axis]
        }
        for name, size in plan.reference.items():
            if name not in plan.axes:
                times = draw.choice([1, 2, 3, 5, point["dp"], point.get("tp", 4), 3 * point.get("tp", 4)])
                point[name] = draw.randint(1, 5) if name == "L" else size * times
        point["B"] *= point["dp"]
        if not plan.why_not(point):
            found.append(point)
    return found


FEW = ("megatron", "a pipeline")  # the others are a sweep
NAMES = [pytest.param(name, marks=[] if name in FEW else pytest.mark.sweep) for name in CASES]


@pytest.mark.sweep
@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_costs_at_50_random_sizes_of_models_and_meshes_are_those_of_a_fresh_compile(name: str) -> None:
    assert_fresh(name, CASES[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_costs_at_a_random_size_are_those_of_a_fresh_compile(name: str) -> None:
    assert_fresh(name, 1)


def assert_fresh(name: str, count: int) -> None:
    """At random points of the plan's region, the first ones the same for any count."""
    plan = plan_of(name)
    for point in points(plan, count, seed=len(name)):
        fresh = CASES[name][0](point)
        assert plan.at(point) == fresh.cost, point
        assert_expressed(plan, point, fresh.cost)


def assert_expressed(plan: SymbolicPlan, point: Point, fresh: Any) -> None:
    """All but the number of buckets, and what lives at the place where most does at the reference."""
    rows = {each.key: each for each in fresh.traffic}
    assert {each.key for each in plan.cost.traffic} == set(rows)
    for ours in plan.cost.traffic:
        its = rows[ours.key]
        assert value(ours.values, point) == its.values, ours
        assert value(ours.bytes, point) == its.bytes, ours
        assert math.floor(value(ours.wire_bytes, point)) == its.wire_bytes, ours
    for name in ("parameters", "gradients", "optimizer", "saved"):
        assert value(plan.cost.memory[name], point) == fresh.memory[name], name
    assert value(plan.cost.flops, point) == fresh.flops


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_at_the_reference_sizes_every_expression_equals_the_plans_number(name: str) -> None:
    plan = plan_of(name)
    assert_expressed(plan, plan.reference, plan.at({}))
    assert {name: value(size, plan.reference) for name, size in plan.cost.memory.items()} == plan.at({}).memory


@pytest.mark.sweep
def test_megatron_sends_its_activations_four_times_a_layer() -> None:
    plan = plan_of("gpt")
    sent = sum(each.wire_bytes for each in plan.cost.traffic if each.axes == ("tp",))
    symbols = {each.name: each for each in sent.free_symbols}
    dp, tp, layers, batch, time, width = (symbols[name] for name in ("dp", "tp", "L", "B", "T", "d"))
    assert (sent - 4 * layers * (4 * batch * time * width / dp) * 2 * (tp - 1) / tp).simplify() == 0
    assert plan.at({"dp": 16384, "tp": 4, "B": 32768}).traffic[0].wire_bytes > 0
    with pytest.raises(shardc.ShardingError, match="B is a multiple of dp"):
        plan.at({"dp": 16})
    with pytest.raises(shardc.ShardingError, match=f"T={CONTEXT} is not in"):
        plan.at({"T": CONTEXT})
    wide = replace(plan, region=replace(plan.region, high={**plan.region.high, "T": CONTEXT}))
    assert wide.why_not({**plan.reference, "T": CONTEXT // 2}) == ""
    assert "positions" in wide.why_not({**plan.reference, "T": CONTEXT})  # the table is read whole


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ((7, 7, 7), "7"),
        ((16, 48, 80), "B"),
        ((96, 288 * 5, 480 * 2), "3*B*T"),
        ((17, 49, 81), "B + 1"),
        ((3 * 16, 11 * 48, 5 * 80), "(T + 1)*B"),
        ((8, 20, 40), ""),
    ],
)
def test_a_number_is_a_product_of_sizes_or_next_to_one(values: tuple[int, ...], form: str) -> None:
    where = [{"B": 16, "T": 2}, {"B": 48, "T": 10}, {"B": 80, "T": 4}]
    found = Fitter(where).fit(values)
    assert (found is None) == (not form)
    if found is not None:
        assert [found.at(point) for point in where] == list(values)
        assert found.at({"B": 1000, "T": 1002}) == eval(form, {"B": 1000, "T": 1002})


@pytest.mark.parametrize(
    "number",
    ["2", "N", "T + 2*N", "T//N + 2", "B*N", "T - 1", "7 + 3*N", "7 + 24//N", "B*N*M", "2*T*N - N", "T*M//N"],
)
def test_a_number_that_depends_on_the_mesh_is_fitted_on_a_few_meshes(number: str) -> None:
    base = {"M": 2, "N": 2}
    dims = [{"B": 4 * b, "T": 32 * t} for b, t in ((1, 1), (2, 3), (7, 5))]
    form = Fitter(dims).fit([eval(number, point | base) for point in dims])
    meshes = [(8, 32, 4, 4), (8, 32, 4, 2), (4, 32, 2, 4), (16, 64, 8, 8)]
    where = [dict(zip("BTMN", sizes, strict=True)) for sizes in meshes]
    assert form is not None
    found = Widening(base, where).widen(form, [eval(number, point) for point in where])
    assert found is not None
    for sizes in ((5, 96, 3, 6), (1, 24, 8, 3), (9, 480, 5, 12)):
        point = dict(zip("BTMN", sizes, strict=True))
        assert found.exact(point) == eval(number, point)


class Halved(nn.Module):
    """Every other token, of the first hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = self.layer(x[:, : min(x.shape[1], 100) : 2]).square().mean()
        return halved


def test_halving_a_size_requires_even_sizes_and_a_bound_limits_the_region() -> None:
    def halved(point: Point) -> shardc.Compiled:
        with torch.device("meta"):
            model, x = Halved(), torch.empty(point["B"], point["T"], 8)
        return shardc.compile(model, Mesh(dp=point["dp"]), {"x": P("dp")}, args=(x,))

    plan = symbolic_plan(halved, {"dp": 2, "B": 4, "T": 16}, ("dp",))
    assert "T is a multiple of 2" in plan.region.conditions
    assert "T is a multiple of 2" in plan.why_not({"dp": 2, "B": 4, "T": 17})
    assert plan.region.high["T"] <= 100
    assert plan.at({"T": 18}) == halved({"dp": 2, "B": 4, "T": 18}).cost


class Branching(nn.Module):
    """What it does goes by whether two sizes are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != y.shape[1]:
            y = self.layer(y)
        result: Tensor = (self.layer(x) @ y.transpose(1, 2)).square().mean()
        return result


def test_there_is_no_cost_where_the_model_takes_another_branch() -> None:
    def branching(point: Point) -> shardc.Compiled:
        with torch.device("meta"):
            model, x, y = Branching(), torch.empty(8, point["T"], 8), torch.empty(8, point["U"], 8)
        return shardc.compile(model, Mesh(dp=point["dp"]), {"x": P("dp")}, args=(x, y))

    plan = symbolic_plan(branching, {"dp": 2, "T": 16, "U": 24}, ("dp",))
    apart, alike = {"dp": 4, "T": 20, "U": 36}, {"dp": 4, "T": 24, "U": 24}
    assert plan.at(apart) == branching(apart).cost
    assert "the model does something else there" in plan.why_not(alike)


class Joined(Tower):
    """What all blocks make, one behind the other."""

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for block in self.blocks:
            made.append(block(made[-1]))
        return torch.cat(made).square().mean()


class Banded(nn.Module):
    """Attention to the last four positions, by a mask that is made of positions."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[2])[:, None]
        mask = (rows >= rows.T) & (rows - rows.T < 4)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().mean()


def test_a_ring_whose_mask_hides_keys_is_refused_with_what_to_say() -> None:
    def compile_(point: Point) -> shardc.Compiled:
        x = torch.empty(2, 2, point["T"], 8, device="meta")
        return shardc.compile(Banded(), Mesh(cp=point["cp"]), {"x": P(None, None, "cp")}, args=(x,), attention="ring")

    with pytest.raises(
        shardc.ShardingError, match=r"keys and values go round\n  a mask hides keys.*\n  count at sizes"
    ):
        symbolic_plan(compile_, {"T": 24, "cp": 2}, ("cp",))


def test_sizes_that_depend_on_the_number_of_modules_have_no_expression() -> None:
    def joined(point: Point) -> shardc.Compiled:
        with torch.device("meta"):
            model, x = Joined(point["L"], 8, 16), torch.empty(point["B"], 8)
        return shardc.compile(model, Mesh(dp=point["dp"]), {"x": P("dp")}, args=(x,))

    plan = symbolic_plan(joined, {"dp": 2, "B": 4, "L": 5}, ("dp",), Repeated("L", "blocks"))
    with pytest.raises(shardc.ShardingError, match="go by how many modules there are"):
        plan.at({"B": 8})


COST = ["cost", "targets:mlp", "--mesh", "dp=2,tp=2"]
SYMBOLIC = [*COST, "--symbol", "B=x.0", "--at", "dp=64,B=512"]
PIPELINE = [
    "cost",
    "targets:for_mesh",
    "--mesh",
    "dp=2,pp=2",
    "--pipeline",
    "pp,microbatches=2",
    *SYMBOLIC[4:-1],
    "dp=64,B=256",
]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (COST, "cost.txt"),
        ([*COST, "--format", "json"], "cost.json"),
        (SYMBOLIC, "cost_symbolic.txt"),
        ([*SYMBOLIC, "--format", "json"], "cost_symbolic.json"),
        (PIPELINE, "cost_pipeline.txt"),
    ],
)
def test_the_output_of_cost_is_golden(
    command: list[str], name: str, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    golden(name, capsys.readouterr().out)


def test_outside_of_its_region_a_plan_has_no_number_unless_it_is_compiled_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outside = [*COST, "--symbol", "B=x.0", "--at", "tp=64", "--at", "dp=4"]
    assert main(outside) == 1
    out, err = capsys.readouterr()
    assert "at dp=4, tp=2, B=8" in out and "at dp=2, tp=64, B=8" not in out
    assert "not known to be the plan there: tp=64 is not in 2 to 32" in err
    assert main([*outside, "--recompile"]) == 0
    out, err = capsys.readouterr()
    assert "at dp=2, tp=64, B=8" in out and "compiled anew" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--symbol", "B=y.0"], "did you mean x.0?"),
        (["--symbol", "dp=x.0"], "the name dp is taken"),
        (["--symbol", "B=x.0", "--at", "b=8"], "name one of dp, tp, B"),
    ],
)
def test_a_symbol_that_names_nothing_in_the_target_is_an_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COST, *arguments]) == 2
    assert said in capsys.readouterr().err
