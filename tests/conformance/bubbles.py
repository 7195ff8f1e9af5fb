"""Pipelines whose stages sleep: how long their ranks idle, on gloo and simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from shardc import Mesh
from shardc.costs.stages.schedule import schedule_of
from shardc.language.words import Part
from shardc.options import Pipeline
from shardc.runtime.comm.comm import Comm
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.execute.part import Env
from shardc.runtime.pipeline.stages import StageRunner
from shardc.schedules.simulate import Costs, StageCost, simulate
from shardc.schedules.timeline import Timeline

LAYERS, MICROBATCHES, STEPS, TRIES = 8, 4, 2, 5
SECONDS = {"forward": 0.08, "input_gradient": 0.06, "weight_gradient": 0.04}  # of a stage, on four ranks
NEAR = 0.05


@dataclass(frozen=True)
class Case:
    """A schedule on so many ranks of four, with stages that sleep; the last takes half as long again as the others."""

    schedule: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.schedule} on {self.ranks} ranks"

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=4) if self.ranks == 4 else Mesh(dp=2, pp=2)

    @property
    def pipeline(self) -> Pipeline:
        starts = range(LAYERS // self.stages, LAYERS, LAYERS // self.stages)
        return Pipeline(
            microbatches=MICROBATCHES, schedule=self.schedule, cuts=tuple(f"layers.{2 * i}" for i in starts)
        )

    @property
    def stages(self) -> int:
        return self.ranks * (2 if self.schedule == "interleaved" else 1)

    def seconds(self, stage: int, part: Part) -> float:
        return SECONDS.get(part, 0) * 4 / self.ranks * (1.5 if stage == self.stages - 1 else 1)

    def wanted(self) -> Timeline:
        costs = (StageCost(*(self.seconds(stage, part) for part in SECONDS)) for stage in range(self.stages))  # type: ignore[arg-type]
        compiled = shardc.compile(Model(), self.mesh, args=(data(),), pipeline=self.pipeline)
        return simulate(schedule_of(compiled.program), Costs(tuple(costs)))


CASES = tuple(Case(schedule, ranks) for ranks in (2, 4) for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(6, 6), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean()
        return result


def data() -> Tensor:
    return torch.ones(8, 5, 6)


def run_asleep(case: Case) -> list[tuple[float, float, float]]:
    """When this rank's first scheduled part starts, when its last one ends, and how long it was busy, of some steps."""
    piped = shardc.parallelize(Model(), make_device_mesh(case.mesh), pipeline=case.pipeline)
    whole, found, times = StageRunner.run, [], list[tuple[float, float]]()
    piped(data())

    def run(self: StageRunner, part: Part, envs: Sequence[Env], comm: Comm) -> None:
        start = time.monotonic()
        whole(self, part, envs, comm)
        left = case.seconds(next(way.source for way in self.leaving), part) - (time.monotonic() - start)
        time.sleep(max(0, left))
        if part in SECONDS:
            times.append((start, time.monotonic()))

    with mock.patch.object(StageRunner, "run", run):
        for _ in range(STEPS):
            times.clear()
            dist.barrier()
            piped(data())
            found.append((times[0][0], times[-1][1], sum(end - start for start, end in times)))
    return found


def bubble(ranks: Sequence[tuple[float, float, float]]) -> float:
    """Seconds for which the busiest rank idles within a step of all ranks."""
    starts, ends, busy = zip(*ranks, strict=True)
    return max(ends) - min(starts) - max(busy)


def measured(workers: Any, case: Case, wanted: float) -> float:
    """The least bubble of some steps, and of more where it is not near yet: other work makes one longer only."""
    found = float("inf")
    for _ in range(TRIES):
        found = min(found, *map(bubble, zip(*workers(run_asleep, case), strict=True)))
        if found <= (1 + NEAR) * wanted:
            break
    return found
