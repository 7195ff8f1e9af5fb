"""``shardc trace``: the predicted timeline of a step, for a trace viewer."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import add_command, add_compile_options, add_output_options
from shardc.cli.compile import compiled, write

HELP = "predict when each op and each collective of a step runs: JSON for ui.perfetto.dev and chrome://tracing"
MEASURED = """A measured step has the same names, phase/module/op:
    with torch.profiler.profile() as profile:
        step()
    profile.export_chrome_trace("measured.json")
With compile="inductor" a measured step has one range for each compiled part, forward/(model)/inductor and
backward/(model)/inductor, since Inductor fuses ops of several modules."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "trace", HELP)
    add_compile_options(parser)
    add_output_options(parser, "trace")
    parser.description = f"{HELP}. {MEASURED}"


def run(options: argparse.Namespace) -> int:
    """Compile, and write the timeline."""
    write(compiled(options).timeline.chrome_trace(), options.output)
    return GOOD
