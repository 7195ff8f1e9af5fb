"""Several stages a rank begin where the schedule ends first: never later than with as many layers in each stage."""

from __future__ import annotations

import pytest
import torch
from captured_once import captured_once
from cases import few
from gpt import GPT, Config
from torch import Tensor, nn

import shardc
from shardc import Mesh, Pipeline
from shardc.costs.stages.record import StageRecord

LAYERS = 8


class Layers(nn.Module):
    """Equal layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def record(model: nn.Module, pp: int, pipeline: Pipeline) -> StageRecord:
    ids = torch.zeros(16, 32, dtype=torch.int64)
    args = (ids, ids) if isinstance(model, GPT) else (torch.zeros(16, 64),)
    with captured_once():
        return StageRecord(shardc.compile(model, Mesh(pp=pp), args=args, pipeline=pipeline).program)


def gpt(vocab: int = 128) -> GPT:
    with torch.device("meta"):
        return GPT(Config(layers=LAYERS, vocab=vocab))


def even(num_stages: int) -> tuple[str, ...]:
    """The cuts with as many layers in each stage."""
    return tuple(f"blocks.{stage * LAYERS // num_stages}" for stage in range(1, num_stages))


def assert_no_slower_than_by_layers(model: nn.Module, pp: int, schedule: str, microbatches: int) -> None:
    pipeline = Pipeline(microbatches=microbatches, schedule=schedule)
    layers = Pipeline(microbatches=microbatches, schedule=schedule, cuts=even(2 * pp))
    chosen, by_layers = (record(model, pp, each).timeline.makespan for each in (pipeline, layers))
    assert chosen <= by_layers * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved", "interleaved-zb"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_step_is_no_slower_than_with_as_many_layers_in_each_stage(pp: int, schedule: str) -> None:
    for microbatches in (4, 8):
        assert_no_slower_than_by_layers(Layers(), pp, schedule, microbatches)


@pytest.mark.sweep
def test_a_step_of_a_gpt_is_no_slower_either() -> None:
    assert_no_slower_than_by_layers(gpt(), 4, "interleaved", 4)


@pytest.mark.parametrize("balance", few(["params", "flops", "time"], "params"))
def test_eight_equal_layers_in_a_v_over_four_ranks_have_a_stage_each(balance: str) -> None:
    found = record(gpt(), 4, Pipeline(microbatches=4, schedule="zb-v", balance=balance))
    assert [first for first, _ in found.modules][1:] == list(even(8))
    assert round(found.timeline.makespan * 1e3, 2) == 2.16


def test_a_wide_head_has_a_stage_for_itself() -> None:
    found = record(gpt(vocab=50000), 2, Pipeline(microbatches=4, schedule="interleaved"))
    by_layers = record(gpt(vocab=50000), 2, Pipeline(microbatches=4, schedule="interleaved", cuts=even(4)))
    assert found.timeline.makespan < 0.98 * by_layers.timeline.makespan


def test_auto_chooses_how_many_stages_a_rank_has() -> None:
    seconds = {chunks: record(gpt(), 4, Pipeline(microbatches=4, schedule="auto", chunks=chunks)) for chunks in (1, 2)}
    found = record(gpt(), 4, Pipeline(microbatches=4, schedule="auto"))
    assert found.timeline.makespan == min(each.timeline.makespan for each in seconds.values())
    assert found.schedule.num_stages == 8


def test_auto_keeps_one_stage_a_rank_where_the_user_says_where_stages_begin() -> None:
    assert record(Layers(), 2, Pipeline(microbatches=4, schedule="auto", cuts=("blocks.3",))).schedule.num_stages == 2
