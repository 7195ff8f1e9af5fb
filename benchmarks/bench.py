"""Step time, bytes and memory of shardc and its peers on the same model, side by side in one run.

    python benchmarks/bench.py                                        # what `make bench` runs
    python benchmarks/bench.py --plans tensor --sizes small --ranks 2     # one row

Writes a Markdown table to stdout, with which of shardc's promises hold, and with it as JSON and as a plot to the folder
of --out. Where a peer is ahead it is followed by what both spend their time on.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the model; started processes take the path over
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one device's threads do not spin where others compute

import torch
from budget import Budget
from figures import Figures, figures
from measure import Steps, measure
from network import network
from report import brief, markdown, write
from row import ROWS, Row
from trainer import Job
from verdict import summary, verdicts
from workload import SIZES

from shardc.runtime.launch import Workers

PLAIN = tuple(name for name in ROWS if "compiled" not in name)
DEFAULT = (
    *((plan, "small", 2) for plan in PLAIN),
    *((plan, "tiny", 2) for plan in ("data", "zero3", "tensor", "expert")),
    *((plan, "medium", 2) for plan in ("zero3", "tensor", "data")),
    *((plan, "small", 4) for plan in ("data", "zero3", "tensor", "expert", "zero1", "sequence")),
    *((plan, "medium", 4) for plan in ("zero3", "tensor")),
    ("tensor-compiled", "small", 2),
)


def main() -> None:
    """Run the rows that were asked for."""
    options = _parse()
    found: list[tuple[Row, list[Figures]]] = []
    said: list[str] = []
    rows = _rows(options)
    budget = Budget(60 * options.minutes, [row.weight for row in rows])
    for ranks, together in groupby(rows, key=lambda row: row.job.ranks):
        with network(options.mbit), Workers(ranks) as workers:
            for row in together:
                seconds = budget.share()
                if seconds is None:
                    said.append(f"{row.plan}, {row.title}: left out, {options.minutes} minutes are not enough")
                    continue
                steps = Steps(options.least, options.steps, seconds, budget.left)
                found.append((row, figures(row, workers.run(measure, row, steps))))
                budget.note(max(len(each.samples) for each in found[-1][1]), steps.least)
                said += verdicts(*found[-1], options.profile)
                print(f"{budget.seconds:.0f} s\n{markdown(found[-1:])}", *said, sep="\n", file=sys.stderr)
    said += [summary(found), f"{budget.seconds:.0f} seconds of {60 * options.minutes:.0f}"]
    print(f"{brief(found)}\n\n{markdown(found)}\n", *said, sep="\n")
    write(options.out, found, "\n".join(said))


def _rows(options: argparse.Namespace) -> list[Row]:
    """What was asked for; where nothing was, what fits in ten minutes on two idle processors.

    There peers that are far behind are in one size's rows alone.
    """
    plans, sizes, ranks = options.plans or PLAIN, options.sizes or ["small"], options.ranks or [2, 4]
    is_default = not (options.plans or options.sizes or options.ranks)
    chosen = DEFAULT if is_default else sorted(product(plans, sizes, ranks), key=lambda each: each[2])
    dtype = getattr(torch, options.dtype)
    return [
        Row(plan, size, Job(ranks, options.optimizer, dtype=dtype), not is_default or (size, ranks) == ("small", 2))
        for plan, size, ranks in chosen
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=Steps().most, help="rounds of a row, at most")
    parser.add_argument("--least", type=int, default=Steps().least, help="rounds of a row, at least")
    parser.add_argument("--minutes", type=float, default=10.0, help="in all; rows that would end later are left out")
    parser.add_argument("--profile", action="store_true", help="where time goes, also where shardc is ahead")
    kernels = ("fused", "foreach", "loop")
    parser.add_argument("--optimizer", choices=kernels, default="fused", help="AdamW's kernel, for all")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--mbit", type=int, help="Mbit/s of a network of the ranks' own, where the system allows it")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and steps.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
