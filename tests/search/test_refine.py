"""What a search ends with cannot be made better by one annotation more."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product

import pytest
import torch
from torch import nn

import shardc
from shardc import P
from shardc.language.machine import Machine

WORTH = 1e-3
PLAIN = {"pipeline": None, "overlap": None, "saved": None}


class Chain(nn.Module):
    """Products of many widths, with a rectifier after each; in no list."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        for i, (size, out) in enumerate(pairwise(widths)):
            self.add_module(f"layer_{i}", nn.Linear(size, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("given", [{}, {"x": P("dp")}], ids=["nothing", "samples"])
def test_no_further_annotation_makes_the_best_plan_faster(given: dict[str, P]) -> None:
    with torch.device("meta"):
        model, x = Chain((256, 1024, 64, 2048, 512)), torch.empty(256, 256)
    machine = Machine({"*": "nvlink"}, "h100", node=2, between="infiniband")
    best = shardc.suggest(model, 4, args=(x,), links=machine, annotations=given, fix={"mesh": "2x2", **PLAIN})[0]
    compiled = shardc.compile(model, args=(x,), **best)
    further = [
        {name: P(*[P.OPEN] * dim, axis, ...)}
        for name, parameter in model.named_parameters()
        for dim, axis in product(range(parameter.ndim), best.mesh.axis_names)
        if name not in best.annotations
    ]
    times = [_seconds(compiled, {**best.annotations, **each}) for each in further]
    assert sum(each < float("inf") for each in times) > 5
    assert min(times) > (1 - WORTH) * best.seconds


def test_no_other_sizes_of_the_axes_make_the_best_plan_faster() -> None:
    with torch.device("meta"):
        model, x = Chain((2048, 4096, 64, 1024)), torch.empty(256, 2048)
    best = shardc.suggest(model, 24, args=(x,), links="nvlink", device="h100", fix=PLAIN)[0]
    compiled = shardc.compile(model, args=(x,), **best)
    axes, others = best.mesh.axis_names, [(2, 12), (3, 8), (4, 6), (6, 4), (8, 3), (12, 2)]
    meshes = [shardc.Mesh(**dict(zip(axes, sizes, strict=True))) for sizes in others]
    times = [compiled.recompile(mesh=mesh).timeline.makespan for mesh in meshes]
    assert min(times) > (1 - WORTH) * best.seconds


def _seconds(compiled: shardc.Compiled, annotations: Mapping[str, P]) -> float:
    try:
        return compiled.recompile(annotations=annotations).timeline.makespan
    except shardc.ShardingError:
        return float("inf")
