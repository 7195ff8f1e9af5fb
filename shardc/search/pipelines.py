"""Pipelines: each stage of the model runs on its own part of the devices, all parts with the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardc.options import Pipeline
from shardc.search.pricing.price import Price
from shardc.search.space.plan import Plan
from shardc.search.task import Task

AXIS = "pp"
PER_STAGE = (1, 2, 4, 8)  # microbatches, in multiples of the number of stages
UNEVEN = 1.2  # assumed ratio of the fullest stage's stored bytes to an even share


@dataclass(frozen=True, slots=True)
class Estimate:
    """A plan with a pipeline, and its time and peak memory as estimated before it is compiled."""

    plan: Plan
    seconds: float
    peak: float


def num_stages_of(task: Task, num_parts: int) -> list[int]:
    """The numbers of stages to try: divisors of the number of devices, at most ``num_parts`` unless they are fixed."""
    if task.pipelines is not None and not any(task.pipelines):
        return []
    most = task.devices if task.pipelines else min(task.devices, num_parts)
    sizes = [each for each in task.sizes.get(AXIS, range(2, most + 1)) if each > 1 and task.devices % each == 0]
    return [each for each in sizes if task.meshes is None or any(each in mesh for mesh in task.meshes)]


def with_stages(
    plan: Plan, price: Price, num_stages: int, num_samples: int, fixed: Sequence[Pipeline | None] | None = None
) -> Iterator[Estimate]:
    """Estimates with several numbers of microbatches, from a plan for one stage's devices priced for the whole model.

    A stage takes its share of the time, plus the time until the first microbatch has passed all other stages. The price
    has the activations of the whole batch; a stage keeps those of at most as many microbatches as there are stages.
    ``fixed``: the only pipelines to try, if they are fixed.
    """
    options = (
        fixed
        if fixed is not None
        else [Pipeline(AXIS, n, balance="time") for n in _microbatches(plan, num_stages, num_samples)]
    )
    for pipeline in filter(None, options):
        count = pipeline.microbatches
        seconds = price.seconds / num_stages * (1 + (num_stages - 1) / count)
        stored = price.parameters + price.gradients + price.optimizer
        working = max(0.0, price.peak - stored - price.saved) / count
        peak = UNEVEN * stored / num_stages + price.saved * min(num_stages, count) / count / num_stages + working
        yield Estimate(replace(plan, pipeline=pipeline, num_stages=num_stages), seconds, peak)


def _microbatches(plan: Plan, num_stages: int, num_samples: int) -> Sequence[int]:
    """Numbers of microbatches that divide the samples of each rank."""
    shards = prod(axis.size for axis in plan.axes if axis.cuts_samples)
    of_rank = num_samples // shards
    return [num_stages * times for times in PER_STAGE if of_rank and of_rank % (num_stages * times) == 0]
