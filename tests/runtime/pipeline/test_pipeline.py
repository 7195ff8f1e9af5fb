"""A pipeline equals one device: skips, tied weights, masks, frozen stages, dropout, uneven microbatches, schedules."""

from __future__ import annotations

import re
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_models import COLUMNS, Model, data, some_targets
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.costs.memory import memory_by_rank
from shardc.language.errors import ShardingError
from shardc.options import Pipeline
from shardc.program.program import Program
from shardc.program.stages import Crossing, stages_of
from shardc.runtime.pipeline.offload import Host

Run = tuple[list[Tensor], dict[str, Tensor | None]]
DROPPING, FEW_TARGETS = {"is_tied": True, "dropout": 0.3}, some_targets(10)


def check(
    options: dict[str, object], args: tuple[Tensor, ...], mesh: Mesh, pipeline: Pipeline, batch: P | None = None,
    backwards: int = 2,
) -> None:  # fmt: skip
    """Losses and gradients are those of one device within 1e-12, after one step and after two without zero_grad."""
    annotations = {"ids": batch, "targets": batch} if batch else {}
    found = run(shardc.parallelize(made(options), mesh, annotations, pipeline=pipeline), args, backwards)
    expected = one_device(tuple(options.items()), args, backwards)
    assert {name: each is None for name, each in found[1].items()} == {
        name: each is None for name, each in expected[1].items()
    }
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    for name, gradient in found[1].items():
        if gradient is not None:
            torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=1e-12, msg=name)


def made(options: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).double()  # type: ignore[arg-type]


@cache
def one_device(options: tuple[tuple[str, object], ...], args: tuple[Tensor, ...], backwards: int) -> Run:
    """Of the model itself; with dropout, which draws as shardc does, on a mesh of one rank. Once for the same args."""
    model = made(dict(options))
    return run(shardc.parallelize(model, Mesh(one=1)) if "dropout" in dict(options) else model, args, backwards)


def run(model: nn.Module, args: tuple[Tensor, ...], backwards: int) -> Run:
    """The losses of some steps, and in evaluation; and the gradients that are added up."""
    losses: list[Tensor] = []
    for _ in range(backwards):
        losses.append(model(*args))
        losses[-1].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return [*(loss.detach() for loss in losses), model.eval()(*args)], gradients


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])  # every one: the conformance suite "pipelines"
def test_every_schedule_equals_one_device(schedule: str) -> None:
    check(DROPPING, FEW_TARGETS, Mesh(pp=4), Pipeline(microbatches=4, schedule=schedule))


OFFLOADED = {
    "interleaved": Pipeline(microbatches=4, schedule="interleaved", chunks=4, offload=True),
    "zb-v": Pipeline(microbatches=4, schedule="zb-v", offload=True),
}


@pytest.mark.parametrize("pipeline", OFFLOADED.values(), ids=OFFLOADED)
def test_stages_offloaded_to_host_memory_equal_one_device(pipeline: Pipeline) -> None:
    check(DROPPING, FEW_TARGETS, Mesh(pp=2), pipeline)


@pytest.mark.slow
def test_with_offload_a_device_holds_less_and_moves_the_rest() -> None:
    def peak(**options: Any) -> int:
        pipeline = Pipeline(microbatches=4, schedule="interleaved", chunks=4, **options)
        found: int = shardc.compile(Model(), Mesh(pp=2), pipeline=pipeline, args=data()).memory["peak"]
        return found

    with mock.patch.object(Host, "copy_out", autospec=True, side_effect=Host.copy_out) as out:
        check({}, data(), Mesh(pp=2), OFFLOADED["interleaved"], backwards=1)
    assert out.call_count > 20 and peak(offload=True) < 0.75 * peak()


@pytest.mark.slow
@pytest.mark.parametrize("column", ["dropout", "tied", "mask", "uneven"])  # every one: the suite "pipelines"
def test_every_model_in_a_pipeline_equals_one_device(column: str) -> None:
    check(*COLUMNS[column], Mesh(pp=3), Pipeline(microbatches=4))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_any_number_of_microbatches_equals_one_device(microbatches: int) -> None:
    check({}, data(), Mesh(pp=4), Pipeline(microbatches=microbatches))


def test_the_batch_is_cut_over_ranks_too() -> None:
    check({"is_tied": True}, some_targets(10), Mesh(dp=2, pp=2), Pipeline(microbatches=4), P("dp"))


def test_one_microbatch_of_one_sample_on_each_rank_equals_one_device() -> None:
    check({}, data(), Mesh(dp=8, pp=2), Pipeline(microbatches=1), P("dp"))


@pytest.mark.slow
def test_the_auto_schedule_equals_one_device_and_is_chosen_by_the_cost_of_stages() -> None:
    check({"is_tied": True}, some_targets(10), Mesh(pp=2), Pipeline(microbatches=3, schedule="auto", chunks=2))


@pytest.mark.slow
def test_the_memory_of_a_rank_bounds_what_auto_chooses() -> None:
    def chosen(most: int | None) -> int:
        pipeline = Pipeline(microbatches=8, schedule="auto", max_memory=most)
        torch.manual_seed(0)
        return kept_at_most(shardc.compile(Model(), Mesh(pp=4), pipeline=pipeline, args=data()).program)

    free = chosen(None)
    assert chosen(free) <= free
    less = int(0.7 * free)
    assert chosen(less) <= less
    with pytest.raises(ShardingError, match="the fullest rank holds|schedule is known that needs less"):
        chosen(int(0.2 * free))


def kept_at_most(program: Program) -> int:
    """The bytes that the fullest rank stores, and keeps of microbatches under way."""
    stored = ("parameters", "gradients", "optimizer", "saved")
    return max(sum(memory[name] for name in stored) for memory in memory_by_rank(program))


class Lines(nn.Module):
    """Linear layers alone: weights need a gradient whose padding reads zero, the layer before does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean()
        return result


def test_a_gradient_of_uneven_microbatches_crosses_once_and_is_masked_where_it_is_read() -> None:
    pipeline = Pipeline(microbatches=4, cuts=("layers.1", "layers.2"))
    stages = stages_of(shardc.compile(Lines(), Mesh(pp=3), pipeline=pipeline, args=(torch.rand(10, 4),)).program)
    sent = {way: len(nodes) for way, nodes in stages.crossings.items() if way.part == "input_gradient"}
    assert sent == {Crossing(2, 1, "input_gradient"): 1, Crossing(1, 0, "input_gradient"): 1}


REFUSED = {
    "Pipeline: schedule='1f2b'\n  there is no such schedule\n  did you mean 1f1b?": {"schedule": "1f2b"},
    "Pipeline: balance='bytes'\n  there is no such balance\n  say one of params, flops, time, memory": {
        "balance": "bytes"
    },
    "Pipeline: chunks=0\n  it counts a rank's stages\n  say 1 or more": {"chunks": 0},
    "Pipeline: schedule='zb-h1', chunks=2\n  it has one stage a rank\n  leave chunks out, or say gpipe": {
        "schedule": "zb-h1", "chunks": 2,
    },
    "Pipeline: schedule='zb-v', chunks=3\n  it has two stages a rank\n  leave chunks out": {
        "schedule": "zb-v", "chunks": 3,
    },
    "Pipeline: offload=True, chunks=None\n  a rank has one stage, which is never idle\n  say chunks=3": {
        "offload": True
    },
    "Pipeline: offload=True, max_memory=9\n  it bounds what all stages of a rank hold\n  leave max_memory out": {
        "schedule": "zb-v", "max_memory": 9, "offload": True,
    },
    "Pipeline: microbatches=0\n  it counts pieces of a batch\n  say 1 or more": {"microbatches": 0},
}  # fmt: skip


class Losses(nn.Module):
    """A loss, and one beside it; or what the loss is taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, is_whole: bool = False) -> Tensor | dict[str, Tensor]:
        hidden = self.first(x)
        result: Tensor = self.second(hidden)
        return result if is_whole else {"loss": result.square().mean(), "aux": hidden.square().mean()}


def test_backward_starts_from_one_number() -> None:
    model, x = Losses(), torch.rand(8, 4)
    two = {"args": (x,), "pipeline": Pipeline(microbatches=2), "differentiable": ("loss", "aux")}
    with pytest.raises(ShardingError, match="the outputs loss, aux have gradients\n.*one number alone\n  return their"):
        shardc.compile(model, Mesh(pp=2), **two)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=re.escape("the output 'output' is f32[8, 4]\n  backward runs")):
        shardc.compile(model, Mesh(pp=2), args=(x, True), pipeline=Pipeline(microbatches=2))


def test_simulate_runs_the_schedule() -> None:
    torch.manual_seed(0)
    model, args = Model(is_tied=True).double(), some_targets(10)
    options: dict[str, Any] = {"args": args, "pipeline": Pipeline(microbatches=4, schedule="zb-v")}
    compiled = shardc.compile(model, Mesh(dp=2, pp=2), {"ids": P("dp"), "targets": P("dp")}, **options)
    loss, gradients = compiled.simulate(*args, grad_outputs={"output": torch.tensor(3.0, dtype=torch.float64)})
    expected = model(*args)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    with torch.no_grad():
        alone = shardc.compile(model, Mesh(pp=2), train=False, **options)
        torch.testing.assert_close(alone.simulate(*args)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", REFUSED)
def test_an_impossible_option_is_refused_in_its_constructor(text: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(text)):
        Pipeline(**REFUSED[text])  # type: ignore[arg-type]
