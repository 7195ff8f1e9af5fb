"""``shardc stages``: the model cut into pipeline stages, before one is chosen."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import command, count, mesh, named, written
from shardc.cli.compiled import load, progress, write
from shardc.language.mesh import Mesh
from shardc.options import BALANCES


def add(commands: Any) -> None:
    """The arguments of the command."""
    help_ = "cut the model into pipeline stages: what each holds, does and is sent"
    stages = written(command(commands, "stages", help_), "stages")
    stages.add_argument("--stages", metavar="N", type=count, required=True, help="how many")
    stages.add_argument("--by", choices=BALANCES, default="params", help="in what they are even (params)")
    stages.add_argument(
        "--cut",
        metavar="GLOB",
        action="append",
        default=[],
        type=named,
        help="a stage begins at these modules; may be repeated",
    )
    stages.add_argument("--microbatches", metavar="M", type=count, help="how many there are, each of the inputs' size")
    stages.add_argument("--max-memory", metavar="BYTES", type=count, help="what a rank may hold under 1F1B")
    stages.add_argument("--mesh", type=mesh, help="what a function that takes mesh is given (pp=N)")
    stages.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Capture, cut, and write the stages."""
    from shardc.capture.capture import capture
    from shardc.costs.choose_stages import Wish, split_stages
    from shardc.report.dump.stages import stages_text

    options.mesh = options.mesh or Mesh(pp=options.stages)
    wish = Wish(options.stages, options.by, tuple(options.cut), (), options.microbatches, options.max_memory)
    target = load(options, device="meta")
    with progress(f"cutting into {options.stages} stages"):
        program = capture(target.model, target.args, target.kwargs, train=options.train).program
        found = split_stages(program, wish)
    write(stages_text(found, options.format), options.output)
    return GOOD
