"""Decisions of like layers are compared together where there are many, and one by one in the best plans."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardc.language.machine import Device, Link, Machine
from shardc.search.pool import MANY, Pool
from shardc.search.pricing.price import Pricer
from shardc.search.refine import refine
from shardc.search.search import Search
from shardc.search.space.decision import Decision, decisions_of, tensors_of
from shardc.search.space.meshes import named_axes
from shardc.search.space.plan import Cuts, Plan
from shardc.search.task import Task

NUM_STAGES, LARGE = 12, 6
TASK = Task(2, Machine({"*": Link(1e-6, 1e11)}, Device({"float32": 1e13}, 1e12)))


class Stages(nn.Module):
    """A chain of two products each, of many widths, so that no block repeats; one of them is much wider than others."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 + 8 * i for i in range(NUM_STAGES + 1)]
        hidden = [128 if i != LARGE else 65536 for i in range(NUM_STAGES)]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(widths[i], hidden[i]), nn.ReLU(), nn.Linear(hidden[i], widths[i + 1]))
            for i in range(NUM_STAGES)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


class Loss(nn.Sequential):
    """Modules one after the other, and the mean square of the last one's values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def stages() -> tuple[Pricer, tuple[Decision, ...]]:
    with torch.device("meta"):
        pricer = Pricer(Stages(), (torch.empty(64, 64),), {})
    return pricer, decisions_of(pricer.few, tensors_of(pricer.few, pricer.model))


def test_like_layers_are_one_group_and_no_decision_is_lost() -> None:
    pricer, decisions = stages()
    groups = Pool(pricer, TASK).groups(decisions)
    assert len(decisions) > MANY
    assert sorted(map(len, groups))[-1] == NUM_STAGES
    assert frozenset().union(*groups) == frozenset(decisions)
    assert sum(map(len, groups)) == len(decisions)


def test_one_layer_of_a_group_is_cut_where_the_others_are_better_whole() -> None:
    pricer, decisions = stages()
    search = Search(pricer, TASK)
    search.run(decisions)
    refine(search)
    best = search.best()[0]
    one_by_one = [Plan(named_axes((2,), (frozenset({each}),))) for each in decisions]
    prices = [pricer.of_all(plan, (TASK.machine,)) for plan in one_by_one]
    assert best.price.seconds <= min(price[0].seconds for price in prices if price)
    (cuts,) = (axis.cuts for axis in best.plan.axes)
    of_stages = [each for each in cuts if str(each).startswith("stages.")]
    assert 0 < len(of_stages) < NUM_STAGES
    assert any(str(each).startswith(f"stages.{LARGE}.") for each in of_stages)


def test_decisions_that_cost_the_same_are_all_kept() -> None:
    layers = [module for _ in range(8) for module in (nn.Linear(1024, 1024, device="meta"), nn.ReLU())]
    pricer = Pricer(nn.Sequential(*layers), (torch.empty(64, 1024, device="meta"),), {})
    decisions = decisions_of(pricer.few, tensors_of(pricer.few, pricer.model))
    pool = Pool(pricer, Task(4, Machine({"*": "nvlink"}, "h100")))
    assert len(decisions) > 8
    assert {*pool.distinct(frozenset(), pool.groups(decisions))} == {frozenset({each}) for each in decisions}


def test_sets_for_a_short_axis_are_compared_inside_an_axis_of_samples() -> None:
    layers = [module for _ in range(3) for module in (nn.Linear(1024, 1024, device="meta"), nn.ReLU())]
    pricer = Pricer(Loss(*layers), (torch.empty(64, 64, 1024, device="meta"),), {})
    decisions = decisions_of(pricer.few, tensors_of(pricer.few, pricer.model))
    task = Task(32, Machine({"*": "nvlink"}, "h100"))
    search = Search(pricer, task)
    search.run(decisions)
    samples = frozenset(each for each in decisions if each.kind == "samples")

    def fastest(sets: Iterable[Cuts]) -> float:
        prices = [pricer.of_all(Plan(named_axes((16, 2), (samples, each))), (task.machine,)) for each in sets]
        return min(price[0].seconds for price in prices if price)

    assert fastest(search.inner) < 0.98 * fastest(search.model)
    assert search.best()[0].price.seconds <= fastest(search.inner)


def test_a_dim_that_few_of_the_ranks_can_cut_evenly_is_not_lost() -> None:
    model = Loss(nn.Linear(4096, 12, device="meta"), nn.Linear(12, 4096, device="meta"))
    pricer = Pricer(model, (torch.empty(64, 4096, device="meta"),), {})
    decisions = decisions_of(pricer.few, tensors_of(pricer.few, pricer.model))
    pool = Pool(pricer, Task(16, Machine({"*": "nvlink"}, "h100")))
    of_twelve = {frozenset({each}) for each in decisions if each.size == 12}
    assert of_twelve and of_twelve <= {*pool.distinct(frozenset(), pool.groups(decisions))}
