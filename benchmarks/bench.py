"""Step time, bytes and memory of shardc and its peers on the same model, side by side in one run.

    python benchmarks/bench.py                                        # what `make bench` runs
    python benchmarks/bench.py --plans tensor --sizes small --ranks 2     # one row

Writes a Markdown table to stdout, and with it as JSON and as a plot to the folder of --out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import groupby, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the model; started processes take the path over
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one device's threads do not spin where others compute

import torch
from figures import Figures, figures
from measure import Steps, measure
from network import network
from report import markdown, write
from row import ROWS, Row
from trainer import Job
from workload import SIZES

from shardc.runtime.launch import Workers

PLAIN = tuple(name for name in ROWS if "compiled" not in name)
DEFAULT = (
    *((plan, "small", 2) for plan in PLAIN),
    ("tensor-compiled", "small", 2),
    *((plan, "tiny", 2) for plan in PLAIN),
    *((plan, "small", 4) for plan in PLAIN),
)


def main() -> None:
    """Run the rows that were asked for."""
    options = _parse()
    budget = Budget(options.minutes)
    found: list[tuple[Row, list[Figures]]] = []
    for ranks, rows in groupby(_rows(options), key=lambda row: row.job.ranks):
        with network(options.mbit), Workers(ranks) as workers:
            for row in rows:
                if budget.is_spent():
                    print(
                        f"left out, since {options.minutes} minutes are over: {row.plan}, {row.title}", file=sys.stderr
                    )
                    continue
                steps = Steps(timed=options.steps, seconds=options.row_seconds)
                found.append((row, figures(row, workers.run(measure, row, steps))))
                print(f"{budget.seconds:.0f} s\n{markdown(found[-1:])}", file=sys.stderr)
    print(markdown(found))
    write(options.out, found)


class Budget:
    """Time for all rows: it is spent when another row as long as the longest so far would not end in time."""

    def __init__(self, minutes: float) -> None:
        self._start, self._minutes = time.perf_counter(), minutes
        self._latest = self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def is_spent(self) -> bool:
        """Asked before each row."""
        self._longest = max(self._longest, self.seconds - self._latest)
        self._latest = self.seconds
        return self.seconds + self._longest > 60 * self._minutes


def _rows(options: argparse.Namespace) -> list[Row]:
    """What was asked for, by ranks; where nothing was, what fits in ten minutes on two idle processors."""
    plans, sizes, ranks = options.plans or PLAIN, options.sizes or ["small"], options.ranks or [2, 4]
    is_default = not (options.plans or options.sizes or options.ranks)
    chosen = DEFAULT if is_default else product(plans, sizes, sorted(ranks))
    dtype = getattr(torch, options.dtype)
    rows = [Row(plan, size, Job(ranks, options.optimizer, dtype=dtype)) for plan, size, ranks in chosen]
    return sorted(rows, key=lambda row: row.job.ranks)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=Steps().timed, help="timed steps of everyone in a row")
    parser.add_argument("--row-seconds", type=float, default=10.0, help="timed steps of a row end then, after 5")
    parser.add_argument("--minutes", type=float, default=10.0, help="rows that would end later are left out")
    kernels = ("fused", "foreach", "loop")
    parser.add_argument("--optimizer", choices=kernels, default="fused", help="AdamW's kernel, for all")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--mbit", type=int, help="Mbit/s of a network of the ranks' own, where the system allows it")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and steps.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
