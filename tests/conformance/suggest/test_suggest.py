"""Tests of the suite: models, hand plans, random plans, prices, and the judgement of a suggestion."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")

import moe
import torch

import shardc
from conformance.suggest.hand import hand_plans
from conformance.suggest.judge import Candidate, fastest, problems
from conformance.suggest.models import MODELS, Target, target
from conformance.suggest.plan import OPTIMIZER, Plan, Price, Pricer, price
from conformance.suggest.random_plans import draw_plan, groups, priced, random_plans
from conformance.suggest.run import RANKS, Case, main, plan_of
from shardc import Mesh, P, Pipeline, Zero
from shardc.language.machine import Machine

FAST = Machine({"*": "nvlink"}, "h100")
SLOW = Machine({"*": "nvlink"}, "h100", node=2, between="infiniband")


def small_moe() -> Target:
    with torch.device("meta"):
        model, x = moe.Model(layers=2, width=32, experts=8), torch.empty(8, 16, 32)
    inputs = {"x": x, "target": torch.empty_like(x)}
    tensor = {"tp": {"layers.*.up": P(None, None, "tp")}}
    return Target(model, inputs, tensor, ("norms.0",), ("layers.*.up",), blocks="layers.*")


# Models and hand plans.


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_inputs_are_on_meta_and_its_hand_plans_name_what_it_has(name: str) -> None:
    made = target(name)
    tensors = (*made.model.parameters(), *made.model.buffers(), *made.inputs.values())
    assert all(each.is_meta for each in tensors)
    known = {f"input:{each}" for each in made.inputs} | {f"module:{each}" for each, _ in made.model.named_modules()}
    parameters = {each for each, _ in made.model.named_parameters(remove_duplicate=False)}
    known |= parameters | {f"param:{each}" for each in parameters}
    for ranks in RANKS:
        for plan in hand_plans(made, ranks):
            assert plan.mesh.size == ranks, plan.name
            for pattern in plan.annotations:
                assert any(fnmatchcase(each, pattern) for each in known), (plan.name, pattern)


def names(model: str, ranks: int) -> set[str]:
    return {plan.name for plan in hand_plans(target(model), ranks)}


def test_hand_plans_are_the_known_ones_on_every_factorization() -> None:
    found = names("gpt2", 8)
    assert {"dp=8", "dp=8 zero1", "dp=8 zero2", "dp=8 zero3", "dp=8 fsdp", "dp=8 remat"} <= found
    assert {"dp=4,tp=2 tp + vocabulary", "dp=2,tp=4 tp + vocabulary + sequence zero1", "tp=8 tp by columns"} <= found
    assert {"hsdp 2x4 zero3 over fsdp", "pp=2,dp=4", "pp=4,tp=2", "pp=8 1f1b", "pp=8 gpipe"} <= found
    assert {"ep=8", "dp=2,ep=4", "dp=4,tp=2 experts over tp"} <= names("mixtral", 8)
    assert {"sp=8", "dp=4,sp=2", "dp=4,tp=2 channels"} <= names("unet", 8)
    assert {"dp=8 table by rows", "tp=8 table by rows", "dp=4,tp=2 table by rows"} <= names("recommender", 8)


# Prices.


def test_a_suggestion_is_priced_with_all_its_options() -> None:
    made = small_moe()
    given: dict[str, Any] = {"device": "h100", "links": "nvlink", "optimizer": OPTIMIZER, "fix": {"overlap": "auto"}}
    first = shardc.suggest(made.model, 4, kwargs=made.inputs, **given)[0]
    plan = plan_of(first)
    assert plan.others == {"overlap": "auto"}
    unused = {"links", "optimizer"} | {name for name, value in first.items() if value is None}
    assert {name: value for name, value in plan.arguments.items() if value is not None} == {
        name: value for name, value in first.items() if name not in unused
    }
    assert price(made.model, made.inputs, plan, FAST).seconds == pytest.approx(first.seconds, rel=1e-9)


@pytest.mark.parametrize("machine", [FAST, SLOW], ids=["fast", "slow"])
def test_the_price_of_a_hand_plan_is_that_of_a_compile(machine: Machine) -> None:
    made = target("recommender")
    pricer = Pricer(made.model, made.inputs)
    for plan in [each for each in hand_plans(made, 4) if each.name in ("dp=4", "dp=4 zero3", "dp=2,tp=2 tp zero1")]:
        compiled = shardc.compile(
            made.model, plan.mesh, plan.annotations, kwargs=made.inputs, zero=plan.zero, links=machine,
            optimizer=OPTIMIZER,
        )  # fmt: skip
        both = pricer.prices(plan, [FAST, SLOW])
        assert both[machine is SLOW] == price(made.model, made.inputs, plan, machine)
        assert both[machine is SLOW] == price_of(compiled)


def price_of(compiled: shardc.Compiled) -> Price:
    wire = sum(each.times * each.wire_bytes for each in compiled.collectives)
    count = sum(each.times for each in compiled.collectives)
    return Price(compiled.timeline.makespan, compiled.memory["peak"], wire, count, compiled.cost.flops)


def test_a_pipeline_and_a_cut_of_a_module_have_the_prices_of_a_compile() -> None:
    made = small_moe()
    pricer = Pricer(made.model, made.inputs)
    plans = [
        Plan("pp", Mesh(pp=2, dp=2), made.data("dp"), pipeline=Pipeline(microbatches=2, balance="time")),
        Plan("sequence", Mesh(dp=2, tp=2), {**made.data("dp"), "module:norms.0": P("dp", "tp")}, Zero("dp", 1)),
    ]
    for plan in plans:
        for machine, found in zip((FAST, SLOW), pricer.prices(plan, [FAST, SLOW]), strict=True):
            arguments: dict[str, Any] = plan.arguments
            compiled = shardc.compile(made.model, **arguments, kwargs=made.inputs, links=machine, optimizer=OPTIMIZER)
            assert found == price_of(compiled)


# Random plans.


@pytest.mark.slow
def test_random_plans_follow_their_seed_and_compile() -> None:
    made = target("recommender")
    pricer = Pricer(made.model, made.inputs)
    first, again, other = (random_plans(pricer, made, 16, *each, [FAST]) for each in ((8, 0), (4, 0), (4, 1)))
    assert sum(bool(each.prices) for each in first) == 8
    assert sum(bool(each.reason) for each in first) < 8 and not any(each.is_defect for each in first)
    assert [each.prices for each in first[: len(again)]] == [each.prices for each in again]
    texts = [[each.plan.text for each in plans] for plans in (first, again, other)]
    assert texts[0][: len(again)] == texts[1]
    assert not set(texts[0]) & set(texts[2])


def test_random_plans_are_mostly_plans_that_somebody_might_write_and_of_all_kinds() -> None:
    made, generator = target("gpt2"), random.Random(0)
    plans = [draw_plan(made, 16, generator) for _ in range(400)]
    assert all(plan.mesh.size == 16 for plan in plans)

    def share(is_so: Callable[[Plan], bool]) -> float:
        return sum(map(is_so, plans)) / len(plans)

    assert 0.7 < share(lambda plan: "input:input_ids" in plan.annotations) < 0.95
    assert 0.5 < share(lambda plan: any(name.startswith("param:") for name in plan.annotations)) < 0.9
    assert 0.1 < share(lambda plan: plan.pipeline is not None) < 0.25
    assert 0.15 < share(lambda plan: plan.remat is not None) < 0.35
    assert 0.4 < share(lambda plan: plan.zero is not None) < 0.6
    assert {plan.zero.stage for plan in plans if plan.zero} == {1, 2, 3}
    assert len({plan.mesh.shape for plan in plans if not plan.pipeline}) == 7  # products of 1 to 3 sizes
    assert len({plan.text for plan in plans}) > 350
    cut = {name for plan in plans for name in plan.annotations if name.startswith("param:")}
    matrices = {f"param:{glob}" for glob, group in groups(made.model).items() if group[0].dim() == 2}
    assert matrices <= cut


@pytest.mark.slow
def test_random_pipelines_of_a_model_with_blocks_compile() -> None:
    made = small_moe()
    found = random_plans(Pricer(made.model, made.inputs), made, 4, 10, 0, [FAST])
    assert sum(bool(each.prices) for each in found) == 10
    assert any(each.prices and each.plan.pipeline for each in found)


def test_a_plan_that_is_refused_has_no_price_and_one_on_which_the_compiler_fails_is_a_defect() -> None:
    made = target("recommender")
    pricer = Pricer(made.model, made.inputs)
    refused = priced(pricer, Plan("of no axis", Mesh(dp=2), {"input:numbers": P("tp")}), [FAST])
    assert refused.reason.startswith("ShardingError: ") and not refused.is_defect and not refused.prices

    def failing(plan: Plan, machines: object) -> list[Price]:
        raise AssertionError("an invariant")

    pricer.prices = failing
    assert priced(pricer, Plan("any", Mesh(dp=2)), [FAST]).is_defect


def test_a_group_of_parameters_is_the_same_one_of_each_block() -> None:
    globs = {"norms.*.weight", "norms.*.bias", "layers.*.gate.weight", "layers.*.up", "layers.*.down"}
    assert set(groups(small_moe().model)) == globs


# The judgement.

SLOWER, FASTER, LARGE = Price(2.0, 50, 0, 0, 0), Price(1.0, 60, 0, 0, 0), Price(0.5, 90, 0, 0, 0)


def candidates(**prices: Price) -> list[Candidate]:
    return [Candidate(Plan(name, Mesh(dp=2)), each) for name, each in prices.items()]


def said(suggested: Price) -> dict[str, float]:
    return {"seconds": suggested.seconds, "peak": suggested.peak}


def test_a_suggestion_fails_where_a_hand_plan_that_fits_is_faster() -> None:
    others = candidates(slower=SLOWER, faster=FASTER, large=LARGE)
    assert fastest(others, 80).plan.name == "faster"
    assert problems(said(FASTER), FASTER, others, 80) == []
    (problem,) = problems(said(SLOWER), SLOWER, others, 80)
    assert problem.startswith("faster is 2.0000 times as fast")
    assert problems(said(SLOWER), SLOWER, others, 55) == []
    (problem,) = problems(said(FASTER), FASTER, others, 100)
    assert problem.startswith("large is 2.0000")


def test_equal_plans_may_round_otherwise_and_nothing_more() -> None:
    others = candidates(other=FASTER)
    for more, count in ((5e-7, 0), (2e-6, 1)):
        suggested = replace(FASTER, seconds=1 + more)
        assert len(problems(said(suggested), suggested, others, 80)) == count


def test_sums_of_a_price_may_round_otherwise_and_nothing_more() -> None:
    for more, count in ((5e-7, 0), (2e-6, 1)):
        suggested = replace(FASTER, seconds=1 + more)
        assert len(problems(said(FASTER), suggested, [], 80)) == count


def test_a_suggestion_fails_where_its_price_is_another_or_it_does_not_fit() -> None:
    (problem,) = problems({"seconds": 0.9, "peak": 60}, FASTER, [], 80)
    assert problem == "its seconds is 0.9, and 1 when the plan is compiled"
    (problem,) = problems(said(LARGE), LARGE, candidates(slower=SLOWER), 80)
    assert problem == "it takes 10 B more than there is, where slower fits"
    assert problems(said(LARGE), LARGE, candidates(large=LARGE), 80) == [], "nothing fits"


# The command.


class Planted:
    """A plan as a suggestion, with the attributes that the command reads."""

    def __init__(self, plan: Plan, found: Price) -> None:
        self.mesh, self.annotations, self.zero = plan.mesh, plan.annotations, plan.zero
        self.remat, self.pipeline, self.seconds = plan.remat, plan.pipeline, found.seconds
        self.overlap = self.saved = self.precision = None
        self.memory = {"peak": found.peak}


@cache
def all_plans() -> list[tuple[Plan, Price]]:
    """All plans of the command below, the fastest first."""
    made, machine = target("recommender"), Case("recommender", 2, ("slow",), 2, 0, True).machine("slow")
    pricer = Pricer(made.model, made.inputs)
    plans = [(plan, pricer.prices(plan, [machine])[0]) for plan in hand_plans(made, 2)]
    plans += [(each.plan, each.prices[0]) for each in random_plans(pricer, made, 2, 2, 0, [machine]) if each.prices]
    return sorted(plans, key=lambda each: each[1].seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(0, 0), (-1, 1)], ids=["the fastest", "the slowest"])
def test_the_command_exits_with_1_where_a_suggestion_is_slower(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(model: Any, devices: int, **asked: Any) -> tuple[Planted, ...]:
        assert (model, devices, asked["nodes"]) == (target("recommender").model, 2, 2)
        return (Planted(*[each for each in all_plans() if each[1].peak <= asked["memory"]][number]),)

    monkeypatch.setattr(shardc, "suggest", planted, raising=False)
    options = argparse.Namespace(
        models=["recommender"], ranks=[2], links=["slow"], plans=2, seed=0, only=None, every=1, jobs=1, json=None
    )
    assert main(options) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("recommender")] == [["recommender", "2", "slow"]] * 2
    assert f"suggest: 2 cases, {2 - 2 * code} right, {2 * code} wrong" in "\n".join(lines)
