"""Where memory is short, the first suggestion is the fastest plan that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from gpt import GPT, MLP, Config
from search_models import Blocks, Call, Recommender, attention_model, mlp_model

import shardc
from shardc import Mesh, P, Remat, Zero
from shardc.language.machine import Device, Link, Machine
from shardc.search.found import Found, seconds_at
from shardc.search.pricing.price import Price
from shardc.search.space.plan import Axis, Plan
from shardc.search.task import Task

TWO_NODES = Machine({"*": Link(1e-6, 3e11)}, Device({"float32": 1e13}, 1e12), node=2, between=Link(3e-5, 3e9))
WORTH = 1e-3


def found(seconds: float, peak: float) -> Found:
    return Found(Plan((Axis("dp", 4),)), Price(seconds, 0.0, *[0.0] * 5, peak, 0.0, 0.0))


def test_sets_that_are_slow_without_zero_are_found() -> None:
    """``tp`` cuts the width of the input and the heads: slow, except with parameters stored over ``dp``."""
    model, args = attention_model()
    plan: dict[str, Any] = {"mesh": Mesh(dp=2, tp=2), "zero": Zero("dp", 3), "links": TWO_NODES, "optimizer": "adamw"}
    annotations = {"x": P("dp", P.OPEN, "tp"), "*.proj.weight": P(P.OPEN, "tp")}
    compiled = shardc.compile(model, annotations=annotations, args=args, **plan)
    memory, fix = compiled.memory["peak"], {"pipeline": None, "remat": None}
    first = shardc.suggest(model, 4, args=args, memory=memory, links=TWO_NODES, fix=fix, top=1)[0]
    assert first.fits and first.seconds <= compiled.timeline.makespan


def gpt() -> Call:
    with torch.device("meta"):
        ids = torch.zeros(8, 128).long()
        return GPT(Config(layers=4, vocab=512, context=128, width=256, heads=8)), (ids, ids)


@pytest.mark.parametrize(
    ("call", "megabytes", "ways"),
    [
        (mlp_model, (126, 131, 142, 175), {"links": TWO_NODES, "fix": {"pipeline": None, "remat": None}}),
        pytest.param(
            gpt, (22, 24, 26, 28, 30, 32, 34),
            {"links": "nvlink", "device": "h100", "fix": {"tp": 4, "pipeline": None}}, marks=pytest.mark.sweep,
        ),
    ],
    ids=["mlp", "gpt"],
)  # fmt: skip
def test_more_memory_never_makes_the_first_suggestion_slower(
    call: Any, megabytes: tuple[int, ...], ways: dict[str, Any]
) -> None:
    model, args = call()
    firsts = [shardc.suggest(model, 4, args=args, memory=each * 1e6, top=1, **ways)[0] for each in megabytes]
    assert all(each.fits for each in firsts)
    assert all(more.seconds <= (1 + WORTH) * less.seconds for less, more in pairwise(firsts))
    assert firsts[-1].seconds < 0.99 * firsts[0].seconds


@pytest.mark.parametrize(("memory", "seconds"), [(9, float("inf")), (10, 2.0), (15, 1.5), (20, 1.0), (30, 1.0)])
def test_a_plan_between_two_takes_its_share_of_the_time(memory: float, seconds: float) -> None:
    """The smaller takes 2 s and 10 bytes, the larger 1 s and 20 bytes."""
    assert seconds_at(memory, found(2.0, 10.0), found(1.0, 20.0)) == seconds


def test_of_plans_that_need_the_least_memory_the_fastest_is_first() -> None:
    """Of plans that take the least time, the one with the fewest options and annotations is."""
    task = Task(4, TWO_NODES, objective="memory")
    slow, fast = found(2.0, 10.0), replace(found(1.0, 10.0), plan=Plan((Axis("dp", 4),), zero=Zero("dp", 3)))
    assert min(slow, fast, key=lambda each: each.rank(task)) == fast
    large, small = found(1.0, 20.0), fast
    assert min(large, small, key=lambda each: each.rank(replace(task, objective="time"))) == large


@pytest.mark.parametrize(("stage", "remat"), [(1, None), (3, None), (0, Remat("blocks.*"))], ids=str)
def test_what_is_fixed_is_kept_where_memory_is_short(stage: int, remat: Remat | None) -> None:
    model, args = mlp_model()
    fix = {"zero": stage, "remat": remat, "pipeline": None}
    found = shardc.suggest(model, 4, args=args, memory=130e6, links=TWO_NODES, fix=fix)
    assert {(each.zero.stage if each.zero else 0, each.remat) for each in found} == {(stage, remat)}


def test_parts_are_offloaded_where_what_blocks_save_is_fixed_to_host_memory() -> None:
    """Every plan saves there, so that it is no sign of a plan that needs nothing else."""
    with torch.device("meta"):
        model, x = Blocks(MLP(Config(width=64)) for _ in range(2)), torch.empty(12, 64)
    ways: dict[str, Any] = {"args": (x,), "links": TWO_NODES, "fix": {"saved": {"blocks.*": "host"}, "pipeline": None}}
    smallest = shardc.suggest(model, 4, objective="memory", top=1, **ways)[0]
    assert smallest.zero is not None and smallest.zero.offload and smallest.saved == {"blocks.*": "host"}
    assert shardc.suggest(model, 4, memory=smallest.memory["peak"], top=1, **ways)[0].fits


def test_zero_is_left_out_where_a_further_annotation_makes_it_useless() -> None:
    with torch.device("meta"):
        model, args = Recommender(20000, 32, 8, 256), (torch.zeros(64, 8).long(), torch.zeros(64))
    ways: dict[str, Any] = {"args": args, "links": TWO_NODES, "memory": 3_207_582, "top": 1}
    free = shardc.suggest(model, 4, **ways)[0]
    fixed = shardc.suggest(model, 4, fix={"zero": None}, **ways)[0]
    assert free.fits and free.seconds <= fixed.seconds * (1 + WORTH)


def test_the_cuts_of_an_offloaded_plan_need_not_be_the_best_without_offload() -> None:
    """All of these parameters take long to copy, so that each rank should hold few of them."""
    with torch.device("meta"):
        model, args = Recommender(20000, 32, 8, 256), (torch.zeros(64, 8).long(), torch.zeros(64))
    cuts = {"table.weight": P(None, ("tp", "tp2")), "hidden.weight": P(None, "tp2"), "out.weight": P(None, "tp2")}
    zero = Zero("tp2", 3, offload="parameters")
    plan: dict[str, Any] = {"mesh": Mesh(tp=2, tp2=2), "zero": zero, "links": TWO_NODES, "optimizer": "adamw"}
    compiled = shardc.compile(model, annotations=cuts, args=args, **plan)
    first = shardc.suggest(model, 4, args=args, links=TWO_NODES, memory=1_013_332, top=1)[0]
    assert first.fits and first.seconds <= compiled.timeline.makespan * (1 + WORTH)


def test_least_memory_is_no_more_where_pipelines_are_allowed() -> None:
    model, args = mlp_model()
    ways: dict[str, Any] = {"args": args, "links": TWO_NODES, "objective": "memory", "top": 1}
    alone = shardc.suggest(model, 4, fix={"pipeline": None}, **ways)[0].memory["peak"]
    assert shardc.suggest(model, 4, **ways)[0].memory["peak"] <= alone
    fitting = shardc.suggest(model, 4, args=args, links=TWO_NODES, memory=alone, top=1)[0]
    assert fitting.fits
