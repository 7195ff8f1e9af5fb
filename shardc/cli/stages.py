"""``shardc stages``: cut a model into pipeline stages, before a schedule is chosen."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import add_command, add_output_options, count, mesh, name
from shardc.cli.compile import load, progress, write
from shardc.language.mesh import Mesh
from shardc.options import BALANCES


def add(commands: Any) -> None:
    """Add the command."""
    help_ = "cut the model into pipeline stages: what each stage holds, computes and receives"
    parser = add_command(commands, "stages", help_)
    add_output_options(parser, "stages", ("text", "json"))
    parser.add_argument("--stages", metavar="N", type=count, required=True, help="the number of stages")
    parser.add_argument("--by", choices=BALANCES, default="params", help="what to balance over stages (params)")
    parser.add_argument(
        "--cut", metavar="GLOB", action="append", default=[], type=name,
        help="begin a stage at these modules; may be repeated",
    )  # fmt: skip
    parser.add_argument("--microbatches", metavar="M", type=count, help="how many, each of the size of the inputs")
    parser.add_argument("--max-memory", metavar="BYTES", type=count, help="the most that a rank may hold under 1F1B")
    parser.add_argument("--mesh", type=mesh, help="the mesh for a function that takes one (pp=N)")


def run(options: argparse.Namespace) -> int:
    """Capture, cut, and write the stages."""
    from shardc.capture.capture import capture
    from shardc.costs.stages.choose import SplitOptions, choose_stages
    from shardc.report.dump.dump import stages_text

    options.mesh = options.mesh or Mesh(pp=options.stages)
    split = SplitOptions(options.stages, options.by, tuple(options.cut), (), options.microbatches, options.max_memory)
    target = load(options, device="meta")
    with progress(f"cutting into {options.stages} stages"):
        program = capture(target.model, target.args, target.kwargs, train=options.train).program
        stages = choose_stages(program, split)
    write(stages_text(stages, options.format), options.output)
    return GOOD
