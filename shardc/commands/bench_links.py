"""``shardc bench-links``: the machine measured, for estimated times."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from shardc.arguments import EXIT_CODES, mesh, written
from shardc.invocation import progress, write
from shardc.mesh import Mesh
from shardc.outcome import GOOD

HELP = """\
measure latency and bandwidth between ranks along each mesh axis, and how fast a rank computes; --links FILE of the
other commands then estimates times for this machine. Start it with torchrun to measure the ranks of that job; else it
starts local processes that talk gloo."""


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench-links",
        help="measure the links between ranks, and how fast a rank computes",
        description=HELP,
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "--mesh", type=mesh, help="axes and sizes: dp=2,tp=2; without it one link is that of every axis"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, default=2, help="processes to start where no --mesh is given (2)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=7, help="how often each thing is timed (7)")
    written(parser)


def run(options: argparse.Namespace) -> int:
    """Measure in the ranks of this job, or in processes of our own; the first rank writes."""
    from shardc.runtime.bench_links import UNNAMED, bench_links
    from shardc.runtime.launch import launch, leave

    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    asked = options.mesh or Mesh(device_ids=None, **{UNNAMED: ranks})
    if "RANK" in os.environ:
        machine = bench_links(asked, options.rounds)
    else:
        with progress(f"measuring {asked.size} local processes"):
            machine, *_ = launch(bench_links, asked.size, asked, options.rounds)
    if os.environ.get("RANK", "0") == "0":
        write(json.dumps(machine.to_json(), indent=1) + "\n", options.output)
        print(machine.text(), end="", file=sys.stderr)
    if "RANK" in os.environ:
        leave()
    return GOOD
