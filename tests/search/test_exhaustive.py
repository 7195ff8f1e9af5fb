"""Against all plans: for small models the first suggestion is as good as the best of every possible plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations, product

import pytest
import torch
from cases import few
from moe import MoE
from search_models import Blocks, attention_model, mlp_model
from torch import nn

import shardc
from shardc import Zero
from shardc.language.machine import Device, Link, Machine
from shardc.search.pricing.price import Price, Pricer
from shardc.search.space.decision import Decision, decisions_of, tensors_of
from shardc.search.space.meshes import is_possible, named_axes
from shardc.search.space.plan import Plan

SHAPES = ((4,), (2, 2))
EQUAL = 1e-4  # the search changes no plan for less
DEVICE = Device({"float32": 1e13}, 1e12)
MACHINES = {
    "fast links": Machine({"*": Link(1e-6, 3e11)}, DEVICE),
    "slow links": Machine({"*": Link(1e-5, 3e9)}, DEVICE),
    "slow links between two nodes": Machine({"*": Link(1e-6, 3e11)}, DEVICE, node=2, between=Link(3e-5, 3e9)),
}


def moe_model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        return Blocks(MoE(512, 2048, 8, 1.0) for _ in range(2)), (torch.empty(8, 256, 512),)


MODELS = {"rows": lambda: mlp_model(()), "mlp": mlp_model, "attention": attention_model, "moe": moe_model}
LEFT_OUT = {"moe": ("input:x[1]", "*.weight[0]")}  # positions and the gate: with them there are 30 000 plans

LARGE = (pytest.mark.sweep, pytest.mark.soak)  # minutes for all plans of a model


def subsets(decisions: tuple[Decision, ...]) -> list[frozenset[Decision]]:
    sizes = range(len(decisions) + 1)
    return [frozenset(each) for each in chain.from_iterable(combinations(decisions, size) for size in sizes)]


def every_plan(decisions: tuple[Decision, ...]) -> Iterator[Plan]:
    """Every set of decisions on every axis, without ZeRO and with each stage of it on each axis."""
    for shape in SHAPES:
        for cuts in product(subsets(decisions), repeat=len(shape)):
            axes = named_axes(shape, cuts)
            if is_possible(axes):
                yield Plan(axes)
                yield from (Plan(axes, zero=Zero(axis.name, stage)) for axis in axes for stage in (1, 2, 3))  # type: ignore[arg-type]


@cache
def every_price(name: str) -> list[tuple[Plan, tuple[Price, ...]]]:
    """All plans that can be compiled, with their prices on every machine."""
    model, args = MODELS[name]()
    pricer = Pricer(model, args, {})
    found = decisions_of(pricer.few, tensors_of(pricer.few, model))
    decisions = tuple(each for each in found if str(each) not in LEFT_OUT.get(name, ()))
    machines = tuple(MACHINES.values())
    priced = ((plan, pricer.of_all(plan, machines)) for plan in every_plan(decisions))
    return [(plan, prices) for plan, prices in priced if prices is not None]


def best_of(name: str, machine: str, memory: float) -> tuple[Price, Plan]:
    """The best of all plans that fit in memory."""
    i = list(MACHINES).index(machine)
    fitting = [(each[i], plan) for plan, each in every_price(name) if each[i].peak <= memory]
    return min(fitting, key=lambda pair: pair[0].seconds)


def limit_between(name: str, machine: str, part: float) -> int:
    """Bytes between what the smallest plan needs, at 0, and what the fastest one needs, at 1."""
    fastest, _ = best_of(name, machine, float("inf"))
    smallest = min(each[0].peak for _, each in every_price(name))
    return int(smallest + part * max(0.0, fastest.peak - smallest)) + 1


@pytest.mark.xdist_group("exhaustive")
@pytest.mark.parametrize("part", few((None, 1.0, 0.5, 0.25, 0.0), None, 1.0, 0.0))
@pytest.mark.parametrize("machine", few(MACHINES, "fast links", "slow links between two nodes"))
@pytest.mark.parametrize("name", ["rows", *(pytest.param(name, marks=LARGE) for name in MODELS if name != "rows")])
def test_of_all_plans_on_four_ranks_none_is_better_than_the_first_suggestion(
    name: str, machine: str, part: float | None
) -> None:
    """``part``: of the memory that the fastest plan needs beyond the smallest; None for no limit."""
    limit = None if part is None else limit_between(name, machine, part)
    best, plan = best_of(name, machine, limit or float("inf"))
    model, args = MODELS[name]()
    first, *_ = shardc.suggest(
        model, 4, args=args, memory=limit, links=MACHINES[machine], fix={"pipeline": None, "remat": None}
    )
    assert first.fits, (first.summary(), plan.mesh, plan.annotations, plan.zero)
    assert first.seconds <= best.seconds * (1 + EQUAL), (first.summary(), plan.mesh, plan.annotations, plan.zero)
