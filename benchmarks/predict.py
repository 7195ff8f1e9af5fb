"""Predicted and measured step time of each of the benchmark's plans on this machine.

    python benchmarks/predict.py                                  # small x2, all plans
    python benchmarks/predict.py --plans data tensor --rounds 15

The measurements of ``shardc bench-links`` and a step of every plan alternate in the same processes, so that other load
on the machine affects all of them. Exits with 1 if a prediction is off by more than --within.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the models; child processes inherit the path
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch.distributed as dist
from rounds import everyone_first
from row import ROWS, Row, is_ours
from trainer import SIZES, Job, Trainer

from shardc.costs.count import on_machine
from shardc.costs.step import StepRecord
from shardc.language.machine import Machine
from shardc.language.mesh import Mesh
from shardc.language.record import json_of
from shardc.language.text import table
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh
from shardc.runtime.comm.launch import launch
from shardc.runtime.measure.links import UNNAMED, Bench

PLANS = ("data", "zero1", "zero3", "tensor", "sequence", "expert")
WARM = 2  # steps that are not timed


@dataclass(slots=True)
class Plan:
    """One of shardc's ways to train on this rank, and the ``seconds`` of its steps by round."""

    name: str
    row: Row
    trainer: Trainer
    seconds: list[float] = field(default_factory=list)

    def step(self, i: int) -> float:
        """Take a step that all ranks begin together; returns the seconds on this rank."""
        batches = self.row.batches()
        dist.barrier()
        start = time.perf_counter()
        self.trainer.step(batches[i % len(batches)])
        return time.perf_counter() - start


def compare(
    rows: list[Row], rounds: int, warm: int = WARM
) -> tuple[Machine, list[tuple[str, dict[str, float], list[float]]]]:
    """The measured machine, and for each plan its prediction and the slowest rank's seconds by round."""
    bench = Bench(TorchComm(make_device_mesh(Mesh(device_ids=None, **{UNNAMED: dist.get_world_size()}))))
    plans = [Plan(name, row, row.trainer(name)) for row in rows for name in row.names if is_ours(name)]
    for i in range(warm + rounds):
        bench.round()
        for plan in everyone_first(plans, i):
            seconds = plan.step(i)
            plan.seconds += [seconds] if i >= warm else []
    machine, found = bench.machine(), []
    for plan in plans:
        slowest: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(slowest, plan.seconds)
        program = on_machine(plan.trainer.model.program.program, machine)  # type: ignore[attr-defined]
        found.append((plan.name, json_of(StepRecord(program).entry()), list(map(max, zip(*slowest, strict=True)))))
    return machine, found


def main() -> int:
    """Print the machine and one row for each plan."""
    options = _parse()
    rows = [Row(plan, options.size, Job(options.ranks), is_full=False) for plan in options.plans]
    machine, found = launch(compare, options.ranks, rows, options.rounds)[0]
    print(machine.text())
    cells = [
        (name, _ms(entry["computing"]), _ms(entry["optimizer"]), _ms(_sent(entry)), _ms(entry["step"]),
         _ms(median(seconds)), f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}",
         f"{entry['step'] / median(seconds) - 1:+.0%}")
        for name, entry, seconds in found
    ]  # fmt: skip
    header = (f"{options.size} x{options.ranks}, ms", "computing", "optimizer", "sending", "predicted", "measured",
              "from to", "off by")  # fmt: skip
    print(table(header, cells), end="")
    return int(any(abs(entry["step"] / median(seconds) - 1) > options.within for _, entry, seconds in found))


def _sent(entry: dict[str, float]) -> float:
    """The seconds that communication adds to the step."""
    return entry["step"] - entry["computing"] - entry["optimizer"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS, default=PLANS)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--within", type=float, default=0.3, help="part of the measured time (0.3)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
