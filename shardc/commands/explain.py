"""``shardc explain``: why a parameter, a value, a module's output or a collective is as it is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardc.arguments import command, compiling, written
from shardc.error import ShardingError
from shardc.invocation import compiled, write
from shardc.outcome import GOOD, UsageError

NAME_HELP = (
    "a parameter, an input, an output or a module of the model, or a value or a collective as shardc dump prints it; "
    "param:, input:, output:, module: or value: before it says which, where several are named so"
)


def add(commands: Any) -> None:
    """The arguments of the command."""
    help_ = "say why a parameter, a value or a collective is as it is: the way back to your annotations"
    explain = written(compiling(command(commands, "explain", help_)))
    explain.add_argument("name", metavar="NAME", help=NAME_HELP)
    explain.add_argument("--format", choices=("text", "json"), default="text")
    explain.add_argument("-v", "--verbose", action="store_true", help="long ways whole")


def run(options: argparse.Namespace) -> int:
    """Compile, and explain what is named."""
    program = compiled(options)
    try:
        found = program.explain(options.name)
    except ShardingError as error:
        raise UsageError(f"NAME {options.name!r}", error.what, error.problem, error.remedy) from None
    as_json = options.format == "json"
    text = json.dumps(found.record(), indent=1) + "\n" if as_json else found.text(None if options.verbose else 10)
    write(text, options.output)
    return GOOD
