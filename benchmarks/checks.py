"""The cost of checks between ranks in a training step: with all checks, without those of inputs, and with none.

::

    python benchmarks/checks.py --size small --rounds 60

Three modules of one plan take their steps in turn in the same processes, so that a change of the machine's speed
affects all of them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the models; child processes inherit the path

import torch.distributed as dist
from ours import PLANS, Plan
from trainer import SIZES, Job, Trainer, batches, new_model

from shardc.runtime.comm.launch import launch

RANKS = 2
WAYS = ("check='always'", "check='never'", "no entries")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", nargs="+", default=["dp", "zero3", "tp"])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    print(f"{arguments.size}, {RANKS} ranks, medians of {arguments.rounds} rounds; ratio: to the step without entries")
    print(f"{'plan':10}{'':18}{'ms':>10}{'ratio':>8}")
    for plan in arguments.plans:
        seconds = launch(measure, RANKS, f"shardc {plan}", arguments.size, arguments.rounds, timeout=3600)[0]
        least = statistics.median(seconds[WAYS[-1]])
        for way in WAYS:
            median = statistics.median(seconds[way])
            print(f"{plan:10}{way:18}{1e3 * median:10.1f}{median / least:8.3f}", flush=True)


def measure(plan: str, size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step on this rank, by way; each way is equally often the first of a round."""
    job, data = Job(RANKS), batches(SIZES[size])
    steps: dict[str, Callable[[int], float]] = {}
    for way in WAYS:
        steps[way] = _step_of(_trainer(plan, size, job, way), data)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            dist.barrier()
            begin = time.perf_counter()
            steps[way](number)
            if number > 1:  # the first rounds compile
                seconds[way].append(time.perf_counter() - begin)
    return seconds


def _step_of(trainer: Trainer, data: list[Any]) -> Callable[[int], float]:
    return lambda number: trainer.step(data[number % len(data)])


def _trainer(plan: str, size: str, job: Job, way: str) -> Trainer:
    """A trainer of the plan with the checks that ``way`` names."""
    found = PLANS[plan]
    assert isinstance(found, Plan), plan
    options = {**found.options, "check": "always" if way == WAYS[0] else "never"}
    trainer = Plan(found.axis, found.annotations, options).trainer(new_model(SIZES[size]), job, SIZES[size])
    if way == WAYS[-1]:
        gate: Any = trainer.model.shardc.gate  # type: ignore[attr-defined]
        gate.agreement = copy.copy(gate.agreement)  # so that other modules keep their exchange
        gate.agreement.exchange = lambda data, doing: [data] * RANKS  # this rank's message stands for all messages
    return trainer


if __name__ == "__main__":
    main()
