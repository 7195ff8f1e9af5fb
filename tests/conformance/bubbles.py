"""Pipelines whose stages sleep: how long each part waits and ranks idle, on gloo and simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from shardc.schedules.schedule import Schedule, edges_into, operands
from shardc.schedules.simulate import Costs, StageCost, simulate
from shardc.schedules.timeline import Timeline

LAYERS, MICROBATCHES, STEPS = 8, 4, 2
SCALES = (1, 2, 4)  # the scale of each try
LAG = 0.5  # the largest allowed lag, as a share of the shortest part
SECONDS = {"forward": 0.08, "input_gradient": 0.06, "weight_gradient": 0.04}  # of a stage on four ranks
Span = tuple[float, float]  # when an action starts and ends


@dataclass(frozen=True)
class Case:
    """A schedule for pipelines of two or four of the four ranks, with stages that sleep.

    A stage sleeps ``scale`` times ``SECONDS``, twice that on two ranks, and half as long again in the last stage.
    """

    schedule: str
    ranks: int
    scale: int = 1

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
        return SECONDS.get(part, 0) * self.scale * 4 / self.ranks * (1.5 if stage == self.stages - 1 else 1)

    @property
    def shortest(self) -> float:
        """Seconds of the shortest part."""
        return self.seconds(0, "weight_gradient")

    def planned(self) -> Schedule:
        compiled = shardc.compile(Model(), self.mesh, args=(data(),), pipeline=self.pipeline)
        return schedule_of(compiled.program).compute_only()

    def simulated(self, schedule: Schedule) -> Timeline:
        costs = (StageCost(*(self.seconds(stage, part) for part in SECONDS)) for stage in range(self.stages))  # type: ignore[arg-type]
        return simulate(schedule, Costs(tuple(costs)))


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


def run_asleep(case: Case) -> list[list[Span]]:
    """Run some steps; returns the times of the actions of this rank in each step, in order."""
    is_whole = case.schedule != "zb-h1"  # a backward is one action
    piped = shardc.parallelize(Model(), make_device_mesh(case.mesh), pipeline=case.pipeline)
    whole, found, spans = StageRunner.run, [], list[Span]()
    piped(data())

    def run(self: StageRunner, part: Part, envs: Sequence[Env], comm: Comm) -> None:
        start = time.monotonic()
        whole(self, part, envs, comm)
        left = case.seconds(next(way.source for way in self.leaving), part) - (time.monotonic() - start)
        time.sleep(max(0, left))
        if part == "weight_gradient" and is_whole:
            spans[-1] = (spans[-1][0], time.monotonic())
        elif part in SECONDS:
            spans.append((start, time.monotonic()))

    with mock.patch.object(StageRunner, "run", run):
        for _ in range(STEPS):
            spans.clear()
            dist.barrier()
            piped(data())
            found.append(list(spans))
    return found


def lags(schedule: Schedule, ranks: Sequence[Sequence[Span]]) -> Iterator[float]:
    """Seconds between the time when its rank and its operands are ready and the start of each action."""
    entering = edges_into(schedule.edges)
    rows = [list(zip(row, spans, strict=True)) for row, spans in zip(schedule.actions, ranks, strict=True)]
    done = [(action, end) for row in rows for action, (_, end) in row if action.kind != "W"]
    ends = {(action.stage, action.phase, action.microbatch): end for action, end in done}
    for row in rows:
        before: list[float] = []  # the end of the previous action of the rank
        for action, (start, end) in row:
            awaited = [*before, *(ends[result] for result, _ in operands(action, entering))]
            if awaited:
                yield start - max(awaited)
            before = [end]


def bubble(ranks: Sequence[Sequence[Span]]) -> float:
    """Seconds for which the busiest rank idles within a step of all ranks."""
    busy = max(sum(end - start for start, end in spans) for spans in ranks)
    return max(spans[-1][1] for spans in ranks) - min(spans[0][0] for spans in ranks) - busy


@dataclass(frozen=True)
class Found:
    """Bubbles of a case in seconds, and the longest lag of a part as a share of the shortest part."""

    simulated: float
    measured: float
    lag: float

    @property
    def is_right(self) -> bool:
        """Whether parts only wait as the schedule says: any other wait would take at least as long as a part."""
        return self.lag <= LAG


def measure(workers: Any, case: Case) -> Found:
    """Measure a case on gloo. Stages sleep longer in each try, so that delays by other work matter less."""
    schedule = case.planned()
    found = []
    for scale in SCALES:
        each = replace(case, scale=scale)
        for ranks in zip(*workers(run_asleep, each), strict=True):
            pipelines = [ranks[first : first + case.ranks] for first in range(0, len(ranks), case.ranks)]
            lag = max(max(lags(schedule, pipeline)) for pipeline in pipelines)
            found.append(Found(each.simulated(schedule).bubble, bubble(ranks), lag / each.shortest))
        if any(each.is_right for each in found):
            break
    return min(found, key=lambda found: found.lag)
