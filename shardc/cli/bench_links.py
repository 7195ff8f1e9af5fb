"""``shardc bench-links``: the machine measured, for estimated times."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import EXIT_CODES, Parser, count, mesh, written
from shardc.cli.compiled import progress, write
from shardc.language.errors import UsageError
from shardc.language.mesh import Mesh

HELP = """\
measure latency and bandwidth between ranks along each mesh axis, and how fast a rank computes; --links FILE of the
other commands then estimates times for this machine. Start it with torchrun to measure the ranks of that job; else it
starts local processes that talk gloo."""


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser: Parser = commands.add_parser(
        "bench-links",
        help="measure the links between ranks, and how fast a rank computes",
        description=HELP,
        epilog=EXIT_CODES,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mesh", type=mesh, help="axes and sizes: dp=2,tp=2; without it one link is that of every axis")
    which.add_argument(
        "--ranks", metavar="N", type=count, default=2, help="processes to start where no --mesh is given (2)"
    )
    parser.add_argument("--rounds", metavar="N", type=count, default=7, help="how often each thing is timed (7)")
    written(parser, "links")


def run(options: argparse.Namespace) -> int:
    """Measure in the ranks of this job, or in processes of our own; the first rank writes."""
    _check_ranks(options)
    from shardc.runtime.comm.launch import launch, leave
    from shardc.runtime.measure.links import UNNAMED, bench_links

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


def _check_ranks(options: argparse.Namespace) -> None:
    """A UsageError for more local processes than say anything of links, or for a mesh that is not the job's."""
    wanted, given = options.mesh.size if options.mesh else options.ranks, os.environ.get("WORLD_SIZE", "")
    name = f"--ranks {options.ranks}" if options.mesh is None else f"--mesh {_typed(options.mesh)}"
    if "RANK" in os.environ:
        if options.mesh and str(wanted) != given:
            remedy = f"say a mesh of {given} ranks, or leave --mesh out"
            raise UsageError(name, f"a job of {given} ranks", f"the mesh has {wanted}", remedy)
        return
    processors = os.cpu_count() or 1
    if wanted > max(8, 4 * processors):
        what, problem = f"{processors} processors", "ranks that share one wait for each other, and not for a link"
        remedy = f"say --ranks {max(2, processors)}, or start it with torchrun on the ranks of a job"
        raise UsageError(name, what, problem, remedy)


def _typed(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
