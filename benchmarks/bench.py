"""Step time, bytes and memory of shardc and its peers on the same model, side by side in one run.

    python benchmarks/bench.py                                        # what `make bench` runs
    python benchmarks/bench.py --plans tensor --sizes small --ranks 2     # one row

Prints a Markdown table and which of shardc's promises hold. If a peer is ahead, also prints where both steps spend
their time. Writes all of this, JSON of every sample and a plot to the folder --out.
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

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the models; child processes inherit the path
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin while others compute

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
TIMED = (  # the first row calibrates the budget; the last rows use up the remaining time
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
    """Run the chosen rows."""
    options = parse()
    found: list[tuple[Row, list[Figures]]] = []
    said: list[str] = []
    rows, devices = chosen(options), dict[object, Report]()  # reports of one device, by model
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
    """The rows that the options name, or by default those that fit in ten minutes on two idle processors.

    By default, peers that are known to be far slower run at one size only.
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
    """Parse ``arguments``, or the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=Steps().most, help="most rounds of a row")
    parser.add_argument("--least", type=int, help="fewest rounds of a row (5; tiny 150)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="limit of the whole run; rows that would exceed it are left out"
    )
    parser.add_argument("--profile", action="store_true", help="print where time goes even if shardc is ahead")
    kernels = ("fused", "foreach", "loop")
    parser.add_argument(
        "--optimizer", choices=kernels, default="fused", help="kernel of AdamW, for shardc and peers alike"
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--mbit", type=int, help="limit the ranks' network to so many Mbit/s (Linux, as root)")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and steps.svg")
    return parser.parse_args(arguments)


@contextmanager
def network(mbit: int | None = None) -> Iterator[None]:
    """A private loopback network for processes started in the block, limited to ``mbit`` Mbit/s by ``tc``.

    If the system allows no private network, prints a message, or raises SystemExit if ``mbit`` is given.
    """
    with private_network(is_needed=mbit is not None):
        if mbit is not None:
            limit(mbit, loopback())
        yield


@contextmanager
def private_network(is_needed: bool) -> Iterator[None]:
    """A private loopback network for processes started in the block.

    If the system allows none, prints a message, and raises SystemExit if the network ``is_needed``.
    """
    with private_loopback() as is_private:
        if not is_private:
            print("no private network here: what others send on loopback is counted too", file=sys.stderr)
            if is_needed:
                raise SystemExit("--mbit needs a private network: Linux, and root's rights (unshare -n)")
        yield


def limit(mbit: int, interface: str, within: Sequence[str] = ()) -> None:
    """Limit the sending rate of an interface to ``mbit`` Mbit/s. ``within``: runs ``tc`` in another network."""
    bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
    subprocess.run([*within, "tc", "qdisc", "add", "dev", interface, "root", *bucket], check=True)


if __name__ == "__main__":
    main()
