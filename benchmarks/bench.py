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
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the model; started processes take the path over
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one device's threads do not spin where others compute

import torch
from figures import figures
from measure import Steps, measure
from network import network
from report import markdown, write
from row import ROWS, Row
from trainer import Job
from workload import SIZES

from shardc.runtime.launch import Workers


def main() -> None:
    """Run the rows that were asked for."""
    options = _parse()
    rows = list(_rows(options))
    steps = Steps(timed=options.steps, seconds=options.row_seconds)
    found = []
    for ranks in sorted({row.job.ranks for row in rows}):
        with network(options.mbit), Workers(ranks) as workers:
            for row in (row for row in rows if row.job.ranks == ranks):
                start = time.perf_counter()
                found.append((row, figures(row, workers.run(measure, row, steps))))
                took = time.perf_counter() - start
                print(f"{row.plan}, {row.title}: {took:.0f} s", file=sys.stderr)
                print(markdown(found[-1:]), file=sys.stderr)
    print(markdown(found))
    write(options.out, found)


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """What was asked for. Where no plans were: compiled ones, which take long, at the last size on the fewest ranks."""
    for size in options.sizes:
        for ranks in options.ranks:
            is_first = ranks == min(options.ranks) and size == options.sizes[-1]
            plans = options.plans or [name for name in ROWS if "compiled" not in name or is_first]
            yield from (
                Row(plan, size, Job(ranks, options.optimizer, dtype=getattr(torch, options.dtype))) for plan in plans
            )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=Steps().timed, help="timed steps of everyone in a row")
    parser.add_argument("--row-seconds", type=float, default=15.0, help="timed steps of a row end then, after 5")
    kernels = ("fused", "foreach", "loop")
    parser.add_argument("--optimizer", choices=kernels, default="fused", help="AdamW's kernel, for all")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--mbit", type=int, help="Mbit/s of a network of the ranks' own, where the system allows it")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and steps.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
