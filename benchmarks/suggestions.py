"""Suggested plans compared with handwritten plans: predicted and measured step time on the links of this machine.

    python benchmarks/suggestions.py                              # small, medium and experts on four ranks
    python benchmarks/suggestions.py --models small --mbit 200    # a link of 200 Mbit/s for each rank (Linux, as root)
    python benchmarks/suggestions.py --share                      # no rank computes faster while others wait (as root)

Measures links and processors as ``shardc bench-links`` does, asks ``shardc.suggest`` for the best plans, and trains
with each suggested and each handwritten plan in the same processes, in another order each round, since a step may
depend on the one before it. Plans with the same program are run once. Prints two verdicts for each model:
whether the fastest plan, or one that does not differ from it, is among the first two by prediction, and whether the
first suggestion is within 5 % of the fastest plan. Two plans do not differ if the 95 % interval of their paired ratio
contains 1. Exits with 1 if a verdict is no.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the models; child processes inherit the path
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from gpt import DATA
from ours import EXPERT, SEQUENCE, TENSOR
from processors import shares_left_behind, take_share
from rounds import Ratio, ratio
from switch import plug_in, switch
from torch.distributed.device_mesh import init_device_mesh
from trainer import PIPED, SIZES, Job, Trainer, batches, new_model

import shardc
from shardc import Mesh, P, Pipeline, Zero
from shardc.costs.step_time import COMPUTING
from shardc.language.errors import ShardingError
from shardc.language.machine import Machine
from shardc.language.text import bytes_text, table
from shardc.runtime.comm.launch import Workers
from shardc.runtime.measure.links import UNNAMED, bench_links

WARM = 1  # steps that are not timed
WITHIN = 0.05  # how much slower than the fastest plan the first suggestion may be
FIRST = 2  # the fastest plan should be among this many by prediction
MODELS = {
    "tiny": ("tiny", False),
    "small": ("small", False),
    "medium": ("medium", False),
    "moe": ("small", True),
}  # size, experts


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan to run: sizes of mesh axes by name, annotations, and further options of ``parallelize``."""

    name: str
    axes: Mapping[str, int]
    annotations: Mapping[str, P]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Mesh, options and annotations in short."""
        options = [str(each) for each in self.options.values() if each is not None]
        cuts = [f"{name} {spec!r}" for name, spec in self.annotations.items()]
        return "; ".join([" ".join(f"{name}={size}" for name, size in self.axes.items()), *options, *cuts])


@dataclass(frozen=True, slots=True)
class Predicted:
    """A plan, and the compiler's prediction of its step time and peak memory."""

    plan: Plan
    seconds: float
    computing: float
    peak: int

    @property
    def program(self) -> tuple[object, ...]:
        """A key that is equal for plans with the same program."""
        return tuple(self.plan.axes.values()), self.seconds, self.computing, self.peak


def by_hand(ranks: int, num_blocks: int, has_experts: bool) -> list[Plan]:
    """The plans that a person would write for this model."""
    half = ranks // 2
    one_stage_each = tuple(f"blocks.{rank * num_blocks // ranks}" for rank in range(1, ranks))
    piped = Pipeline(microbatches=PIPED, schedule="1f1b", cuts=one_stage_each)
    plans = [
        Plan("dp", {"dp": ranks}, DATA),
        Plan("ZeRO-1", {"dp": ranks}, DATA, {"zero": Zero("dp", 1)}),
        Plan("ZeRO-3", {"dp": ranks}, DATA, {"zero": Zero("dp", 3)}),
        Plan("1F1B", {"pp": ranks}, {}, {"pipeline": piped}),
    ]
    if has_experts:
        return [*plans, Plan("ep", {"ep": ranks}, EXPERT)]
    return [
        *plans,
        Plan("tp", {"tp": ranks}, TENSOR),
        Plan("tp + sequence", {"tp": ranks}, SEQUENCE),
        Plan("dp x tp", {"dp": half, "tp": ranks - half}, DATA | TENSOR),
    ]


def suggested(found: Sequence[shardc.Suggestion]) -> list[Plan]:
    """The suggestions as plans to run."""
    options = ("zero", "remat", "precision", "pipeline")
    return [
        Plan(f"suggestion {i}", each.mesh.sizes, each.annotations, {name: each[name] for name in options})
        for i, each in enumerate(found, 1)
    ]


def predicted(plan: Plan, model: str, machine: Machine) -> Predicted:
    """The plan with the predicted step time of its compiled program on this machine."""
    size, has_experts = MODELS[model]
    program = shardc.compile(
        new_model(SIZES[size], has_experts), Mesh(device_ids=None, **plan.axes), plan.annotations,
        args=tuple(batches(SIZES[size])[0][0]), links=machine, optimizer="adamw", **plan.options,
    )  # fmt: skip
    is_piped = plan.options.get("pipeline") is not None
    computing = 0.0 if is_piped else sum(task.seconds for task in program.timeline.on(COMPUTING))
    return Predicted(plan, program.timeline.makespan, computing, program.memory["peak"])


def merged(plans: Sequence[Predicted]) -> list[Predicted]:
    """One plan for each program. Its name lists the names of all plans with that program."""
    same: dict[object, list[Predicted]] = {}
    for each in plans:
        same.setdefault(each.program, []).append(each)
    named = ((" = ".join(each.plan.name for each in group), group[0]) for group in same.values())
    return [replace(first, plan=replace(first.plan, name=name)) for name, first in named]


def measured(plans: Sequence[Plan], model: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of the slowest rank in each round, by plan. All plans live in the same processes."""
    torch.set_num_threads(1)
    size, has_experts = MODELS[model]
    given = batches(SIZES[size])
    trainers = {plan.name: _trainer(plan, size, has_experts) for plan in plans}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for i in range(WARM + rounds):
        for name in random.Random(i).sample(list(trainers), len(trainers)):
            dist.barrier()
            start = time.perf_counter()
            trainers[name].step(given[i % len(given)])
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name] += [took.item()] if i >= WARM else []
    return seconds


def _trainer(plan: Plan, size: str, has_experts: bool) -> Trainer:
    mesh = init_device_mesh("cpu", tuple(plan.axes.values()), mesh_dim_names=tuple(plan.axes))
    parallel: Any = shardc.parallelize(
        new_model(SIZES[size], has_experts), mesh, plan.annotations, args=tuple(batches(SIZES[size])[0][0]),
        **plan.options,
    )  # fmt: skip
    return Trainer(parallel, Job(dist.get_world_size()).adamw(parallel.parameters()))


def compare(workers: Workers, model: str, machine: Machine, options: argparse.Namespace) -> bool:
    """Print a table for one model and both verdicts; returns whether both are yes."""
    size, has_experts = MODELS[model]
    own = new_model(SIZES[size], has_experts)
    start = time.process_time()
    found = shardc.suggest(own, options.ranks, args=tuple(batches(SIZES[size])[0][0]), links=machine, top=options.top)
    took = time.process_time() - start
    plans = list[Predicted]()
    for plan in (*suggested(found), *by_hand(options.ranks, SIZES[size].config.layers, has_experts)):
        try:
            plans.append(predicted(plan, model, machine))
        except ShardingError as error:
            print(f"{plan.name} is left out: {error}", file=sys.stderr)
    plans = merged(plans)
    seconds = workers.run(measured, [each.plan for each in plans], model, options.rounds)[0]
    print(f"{model} x{options.ranks}, suggested in {took:.0f} s of processor time; medians of {options.rounds} rounds")
    fastest = min(seconds, key=lambda name: median(seconds[name]))
    ratios = {name: _paired(times, seconds[fastest]) for name, times in seconds.items()}
    print(_table(plans, seconds, ratios))
    return _verdicts(plans, fastest, ratios)


def _paired(times: Sequence[float], fastest: Sequence[float]) -> Ratio:
    return ratio(dict(enumerate(times)), dict(enumerate(fastest)))


def _table(plans: Sequence[Predicted], seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, Ratio]) -> str:
    order = sorted(plans, key=lambda each: each.seconds)
    rows = [
        (each.plan.name, _ms(each.computing), _ms(each.seconds), _ms(median(times)),
         f"{each.seconds / median(times) - 1:+.0%}", str(ratios[each.plan.name]), bytes_text(each.peak), each.plan.text)
        for each in order for times in [seconds[each.plan.name]]
    ]  # fmt: skip
    header = ("plan, ms", "computing", "predicted", "measured", "off by", "beside the fastest", "peak", "which is")
    return table(header, rows)


def _verdicts(plans: Sequence[Predicted], fastest: str, ratios: Mapping[str, Ratio]) -> bool:
    order = sorted({round(each.seconds, 6) for each in plans})
    places = {each.plan.name: order.index(round(each.seconds, 6)) + 1 for each in plans}
    as_fast = min((name for name, each in ratios.items() if each.low <= 1), key=lambda name: places[name])
    first = next(each.paired for name, each in ratios.items() if "suggestion 1" in name.split(" = ")) - 1
    are_good = places[as_fast] <= FIRST, first <= WITHIN
    equal = "" if as_fast == fastest else f", which does not differ from {as_fast}, number {places[as_fast]}"
    print(f"{_yes(are_good[0])}: the fastest, {fastest}, is number {places[fastest]} of the prediction{equal}")
    print(f"{_yes(are_good[1])}: the first suggestion takes {first:+.1%} beside the fastest\n")
    return all(are_good)


def _yes(is_good: bool) -> str:
    return "yes" if is_good else "NO"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def main() -> int:
    """Print the machine and a table for each model."""
    options = _parse()
    with TemporaryDirectory() as folder, switch(options.mbit), shares_left_behind(), Workers(options.ranks) as workers:
        if options.mbit is not None:
            workers.run(plug_in, options.mbit, folder)
        if options.share:
            workers.run(take_share)
        mesh = Mesh(device_ids=None, **{UNNAMED: options.ranks})
        machine = workers.run(bench_links, mesh, options.link_rounds)[0]
        print(machine.text(), flush=True)
        are_good = [compare(workers, model, machine, options) for model in options.models]
    return int(not all(are_good))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[1:])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--link-rounds", type=int, default=5, help="rounds in which links and processors are measured")
    parser.add_argument("--top", type=int, default=5, help="suggestions that are run")
    parser.add_argument("--mbit", type=int, help="a link of so many Mbit/s for each rank (Linux, as root)")
    parser.add_argument("--share", action="store_true", help="a share of the processors for each rank (Linux, as root)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
