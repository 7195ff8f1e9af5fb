"""``shardc trace``: a step as it is predicted, for a viewer of traces."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import command, compiling, written
from shardc.cli.compiled import compiled, write

MEASURED = """A measured step has the same names, phase/module/op:
    with torch.profiler.profile() as found:
        step()
    found.export_chrome_trace("measured.json")
With compile="inductor" it has one for each part that is compiled, forward/(model)/inductor and
backward/(model)/inductor: what Inductor fuses is of no one op or module."""


def add(commands: Any) -> None:
    """The arguments of the command."""
    help_ = "predict when each op and each collective of a step runs: JSON for ui.perfetto.dev and chrome://tracing"
    parser = written(compiling(command(commands, "trace", help_)), "trace")
    parser.description = f"{help_}. {MEASURED}"


def run(options: argparse.Namespace) -> int:
    """Compile, and write the timeline."""
    write(compiled(options).timeline.chrome_trace(), options.output)
    return GOOD
