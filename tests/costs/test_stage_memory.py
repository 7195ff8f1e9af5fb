"""Announced memory of the ranks of a pipeline equals the bytes alive while it runs."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import gpt
import pytest
import torch
from measuring import measured_by_rank, without_optimizer
from random_model import RandomModel, Step

from shardc import Mesh, P, compile
from shardc.costs.memory import memory_by_rank
from shardc.options import Pipeline

OFFLOADED = Pipeline(microbatches=4, schedule="interleaved", chunks=3, offload=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "config", "mesh"),
    [
        (Pipeline(microbatches=4, schedule="gpipe"), gpt.Config(), Mesh(pp=2)),
        (Pipeline(microbatches=4, schedule="1f1b"), gpt.Config(tied=True, dropout=0.1), Mesh(pp=4)),
        (Pipeline(microbatches=4, schedule="zb-h1"), gpt.Config(), Mesh(dp=2, pp=2)),
        (Pipeline(microbatches=4, schedule="zb-v"), gpt.Config(), Mesh(pp=2)),
        (Pipeline(microbatches=3, schedule="1f1b"), gpt.Config(), Mesh(pp=2)),
        (OFFLOADED, gpt.Config(tied=True), Mesh(pp=2)),
        (replace(OFFLOADED, schedule="zb-v", chunks=None), gpt.Config(tied=True), Mesh(pp=2)),
        (replace(OFFLOADED, schedule="gpipe"), gpt.Config(), Mesh(dp=2, pp=1)),
    ],
    ids=[
        "gpipe",
        "1f1b-tied",
        "zb-h1-dp",
        "zb-v",
        "1f1b-uneven",
        "interleaved-offload",
        "zb-v-offload",
        "gpipe-dp-offload",
    ],
)
def test_the_bytes_announced_for_each_rank_are_those_alive(pipeline: Pipeline, config: Any, mesh: Mesh) -> None:
    annotations: dict[str, P] = gpt.DATA if "dp" in mesh.axis_names else {}
    model, args, _, _ = gpt._target(config, annotations)
    compiled = compile(model, mesh, annotations, args=args, pipeline=pipeline)
    ranks = memory_by_rank(compiled.program)
    assert [without_optimizer(each, pipeline.offload) for each in ranks] == measured_by_rank(compiled, *args)
    assert compiled.memory == max(ranks, key=lambda memory: memory["peak"])
    held = sum(memory["parameters"] for memory in ranks)
    place = pipeline.place(compiled.program.num_stages)
    is_twice = config.tied and place[0] != place[-1]  # on the first rank and on the last
    shared = model.tokens.weight.nbytes if is_twice else 0
    assert held == sum(parameter.nbytes for parameter in model.parameters()) + shared


@pytest.mark.parametrize(
    ("pipeline", "ranks", "shape", "steps"),
    [
        (
            Pipeline(microbatches=5, schedule="zb-v"),
            2,
            (7, 5, 4),
            "table7 linear9 repeat2 roll10 shift1 linear2 attention8",
        ),
        (
            Pipeline(microbatches=4, schedule="interleaved"),
            2,
            (9, 3, 8),
            "flip5 softmax7 shift2 linear9 gelu5 linear5 residual4 attention3",
        ),
        (Pipeline(microbatches=1, schedule="interleaved"), 3, (5, 5, 8), "attention7 conv10 flip9"),
    ],
    ids=["zb-v", "interleaved", "three"],
)
def test_what_a_rank_receives_is_contiguous_whatever_it_was_on_its_sender(
    pipeline: Pipeline, ranks: int, shape: tuple[int, ...], steps: str
) -> None:
    """So a reshape of it may be a view on the one and a copy on the other."""
    torch.manual_seed(0)
    drawn = [Step(each.rstrip("0123456789"), int(each.lstrip(ascii_lowercase))) for each in steps.split()]
    model, x = RandomModel(shape[-1], tuple(drawn)), torch.randn(shape, dtype=torch.float64)
    compiled = compile(model, Mesh(pp=ranks), {}, args=(x,), pipeline=pipeline)
    announced = [without_optimizer(each) for each in memory_by_rank(compiled.program)]
    assert announced == measured_by_rank(compiled, x)
