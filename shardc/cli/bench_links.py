"""``shardc bench-links``: measure the machine, for predicted times."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import EXIT_CODES, Parser, add_output_options, count, mesh
from shardc.cli.compile import progress, write
from shardc.language.errors import UsageError
from shardc.language.mesh import Mesh

HELP = """\
Measure latency and bandwidth between ranks along each mesh axis, and how fast a rank computes. With --links FILE the
other commands then predict times for this machine. Start it with torchrun to measure the ranks of that job. Otherwise
it starts local processes that use gloo."""


def add(commands: Any) -> None:
    """Add the command."""
    help_ = "measure the links between ranks, and how fast a rank computes"
    parser: Parser = commands.add_parser("bench-links", help=help_, description=HELP, epilog=EXIT_CODES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mesh", type=mesh, help="axes and sizes: dp=2,tp=2; without it one link stands for every axis")
    which.add_argument("--ranks", metavar="N", type=count, default=2, help="processes to start without --mesh (2)")
    parser.add_argument("--rounds", metavar="N", type=count, default=7, help="how often each measurement runs (7)")
    add_output_options(parser, "links")


def run(options: argparse.Namespace) -> int:
    """Measure in the ranks of this job, or in new local processes. The first rank writes the result."""
    _check_ranks(options)
    from shardc.runtime.comm.launch import launch, leave
    from shardc.runtime.measure.links import UNNAMED, bench_links

    is_job = "RANK" in os.environ
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    measured = options.mesh or Mesh(device_ids=None, **{UNNAMED: ranks})
    if is_job:
        machine = bench_links(measured, options.rounds)
    else:
        with progress(f"measuring {measured.size} local processes"):
            machine, *_ = launch(bench_links, measured.size, measured, options.rounds)
    if os.environ.get("RANK", "0") == "0":
        write(json.dumps(machine.to_json(), indent=1) + "\n", options.output)
        print(machine.text(), end="", file=sys.stderr)
    if is_job:
        leave()
    return GOOD


def _check_ranks(options: argparse.Namespace) -> None:
    """Raise a UsageError for a mesh that is not the job's, or for too many local processes to measure links."""
    num_ranks, job_size = options.mesh.size if options.mesh else options.ranks, os.environ.get("WORLD_SIZE", "")
    sizes = options.mesh.sizes.items() if options.mesh else ()
    name = "--mesh " + ",".join(f"{axis}={size}" for axis, size in sizes) if sizes else f"--ranks {options.ranks}"
    if "RANK" in os.environ:
        if options.mesh and str(num_ranks) != job_size:
            remedy = f"say a mesh of {job_size} ranks, or leave --mesh out"
            raise UsageError(name, f"a job of {job_size} ranks", f"the mesh has {num_ranks}", remedy)
        return
    processors = os.cpu_count() or 1
    if num_ranks > max(8, 4 * processors):
        what, problem = f"{processors} processors", "ranks that share one wait for each other, and not for a link"
        remedy = f"say --ranks {max(2, processors)}, or start it with torchrun on the ranks of a job"
        raise UsageError(name, what, problem, remedy)
