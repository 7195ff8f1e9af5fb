"""Step time, bytes and memory of shardc and its peers on the same model, side by side in one run.

    python benchmarks/bench.py                                        # what `make bench` runs
    python benchmarks/bench.py --plans tensor --sizes small --ranks 2     # one row

Writes a Markdown table to stdout, with which of shardc's promises hold, and with it as JSON and as a plot to the folder
of --out. Where a peer is ahead it is followed by what both spend their time on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the model; started processes take the path over
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one device's threads do not spin where others compute

import torch
from budget import AROUND, Budget, Need, Use, need
from figures import Figures, figures, summary, verdicts
from measure import Report, measure
from report import brief, markdown, write
from rounds import Steps
from row import ONE_DEVICE, ROWS, Row
from trainer import SIZES, Job

from shardc.runtime.comm.launch import Workers
from shardc.runtime.comm.messages import loopback, private_loopback

PLAIN = tuple(name for name in ROWS if "compiled" not in name)
SMALL = ("data", "zero1", "zero3", "tensor", "sequence", "expert", "pipeline")
TIMED = (  # the first tells how fast the processors are; those of two ranks on two take up what time is left
    *((plan, "small", 4) for plan in SMALL),
    *((plan, "medium", 4) for plan in ("tensor", "pipeline", "zero3")),
    ("tensor", "tiny", 2),
    *((plan, "medium", 2) for plan in ("data", "zero3", "tensor", "sequence", "pipeline")),
    *((plan, "small", 2) for plan in SMALL),
)
DEFAULT = (
    *((each, Use.LARGE if "medium" in each else Use.TIME) for each in TIMED),
    *(((plan, "small", 2), Use.BOUND) for plan in ("accumulate", "zero3-kept")),
    *(((plan, "small", 2), Use.BYTES) for plan in ("precision", "remat")),
    *(((plan, "tiny", 2), Use.BYTES) for plan in ("expert", "zero3", "data")),
    (("tensor-compiled", "small", 2), Use.IF_LEFT),
)


def main() -> None:
    """Run the rows that were asked for."""
    options = parse()
    found: list[tuple[Row, list[Figures]]] = []
    said: list[str] = []
    rows, devices = chosen(options), dict[object, Report]()  # one device by model
    budget = Budget(60 * options.minutes - AROUND, [each for _, each in rows])
    for ranks, together in groupby(rows, key=lambda each: each[0].job.ranks):
        with network(options.mbit), Workers(ranks) as workers:
            for row, needed in together:
                seconds = budget.share()
                if seconds is None:
                    said.append(f"{row.plan}, {row.title}: left out, {options.minutes} minutes are not enough")
                    continue
                row = replace(row, with_device=row.model not in devices)
                steps = Steps(needed.fewest, options.steps, seconds, budget.left)
                reports = workers.run(measure, row, steps)
                device = devices.setdefault(row.model, reports[0].get(ONE_DEVICE))
                found.append((row, figures(row, reports, device)))
                budget.note(max(len(each.samples) for each in found[-1][1]))
                said += verdicts(*found[-1], options.profile)
                print(f"{budget.seconds:.0f} s\n{markdown(found[-1:])}", *said, sep="\n", file=sys.stderr)
    said += [summary(found), f"{budget.seconds:.0f} seconds of {60 * options.minutes:.0f}"]
    print(f"{brief(found)}\n\n{markdown(found)}\n", *said, sep="\n")
    write(options.out, found, "\n".join(said))


def chosen(options: argparse.Namespace) -> list[tuple[Row, Need]]:
    """What was asked for; where nothing was, what fits in ten minutes on two idle processors.

    There peers that are far behind are in one size's rows alone.
    """
    plans, sizes, ranks = options.plans or PLAIN, options.sizes or ["small"], options.ranks or [2, 4]
    is_default = not (options.plans or options.sizes or options.ranks)
    asked = [(each, Use.TIME) for each in sorted(product(plans, sizes, ranks), key=lambda each: each[2])]
    job = Job(2, options.optimizer, dtype=getattr(torch, options.dtype))
    rows = list[tuple[Row, Need]]()
    for (plan, size, number), use in DEFAULT if is_default else asked:
        row = Row(plan, size, replace(job, ranks=number), not is_default or (size, number) == ("small", 2))
        row = replace(row, with_device=row.model not in {each.model for each, _ in rows})
        rows.append((row, need(row, use, options.least)))
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for, on the command line unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=Steps().most, help="rounds of a row, at most")
    parser.add_argument("--least", type=int, help="rounds of a row, at least (5; tiny 150)")
    parser.add_argument("--minutes", type=float, default=10.0, help="in all; rows that would end later are left out")
    parser.add_argument("--profile", action="store_true", help="where time goes, also where shardc is ahead")
    kernels = ("fused", "foreach", "loop")
    parser.add_argument("--optimizer", choices=kernels, default="fused", help="AdamW's kernel, for all")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--mbit", type=int, help="Mbit/s of a network of the ranks' own, where the system allows it")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and steps.svg")
    return parser.parse_args(arguments)


@contextmanager
def network(mbit: int | None = None) -> Iterator[None]:
    """Processes started in the block share a network with no one else; at so many Mbit/s, by ``tc``'s token bucket.

    Where the system does not allow the first, the block runs as it is and says so; the second is then an error.
    """
    with private_loopback() as is_private:
        if not is_private:
            print("no private network here: what others send on loopback is counted too", file=sys.stderr)
            if mbit is not None:
                raise SystemExit("--mbit needs a private network: Linux, and root's rights (unshare -n)")
        if mbit is not None:
            bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
            subprocess.run(["tc", "qdisc", "add", "dev", loopback(), "root", *bucket], check=True)
        yield


if __name__ == "__main__":
    main()
