"""A budget of saved bytes holds for each rank of a pipeline, whatever its schedule keeps under way."""

from __future__ import annotations

from functools import cache
from typing import Any

import gpt
import pytest
import torch
from cases import few

import shardc
from shardc import Compiled, Mesh, Remat, ShardingError
from shardc.costs.memory import memory_by_rank
from shardc.options import Pipeline
from shardc.program.stages import stages_of

pytestmark = pytest.mark.xdist_group("choose_saved")  # who shares what is made once
CONFIG = gpt.Config(layers=2, dropout=0.1, width=32, context=16)


@cache
def compiled(schedule: str, remat: Remat | None = None, cuts: tuple[str, ...] | None = None) -> Compiled:
    model, args, _, _ = gpt._target(CONFIG, {})
    pipeline = Pipeline(microbatches=4, schedule=schedule, cuts=cuts)
    return shardc.compile(model.double(), Mesh(pp=2), args=args, pipeline=pipeline, remat=remat)


def saved(program: Compiled) -> list[int]:
    return [memory["saved"] for memory in memory_by_rank(program.program)]


def results(program: Compiled) -> Any:
    return program.simulate(*gpt._target(CONFIG, {})[1])


@pytest.mark.parametrize("schedule", few(["1f1b", "zb-v"], "zb-v"))
def test_no_rank_saves_more_than_the_budget(schedule: str) -> None:
    """Of all its microbatches under way; a rank that saves less anyway makes nothing again; the bits are the same."""
    whole = compiled(schedule)
    before = saved(whole)
    budget = int(0.75 * max(before))
    less = compiled(schedule, Remat(budget=budget))
    assert 0.8 * budget <= max(saved(less)) <= budget
    if schedule == "1f1b":
        assert saved(less)[1] == before[1] < budget
    (loss, gradients), (expected, wanted) = results(less), results(whole)
    assert torch.equal(loss, expected) and all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def test_an_error_names_the_least_budget_of_a_rank_and_it_is_enough() -> None:
    with pytest.raises(ShardingError) as caught:
        compiled("1f1b", Remat(budget=1000))
    assert f"{max(saved(compiled('1f1b')))} are saved without it" in str(caught.value)
    least = int(caught.value.remedy.split("=")[1].split()[0])
    assert max(saved(compiled("1f1b", Remat(budget=least)))) == least


def test_blocks_that_a_cut_goes_through_send_what_they_sent() -> None:
    """What crosses between stages is not made again on the other side."""
    cuts = ("blocks.1.norm2",)
    plain, less = (stages_of(compiled("1f1b", remat, cuts).program) for remat in (None, Remat("blocks.*")))
    sent = [{way: len(nodes) for way, nodes in each.crossings.items()} for each in (plain, less)]
    assert sent[0] == sent[1]
