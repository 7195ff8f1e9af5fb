"""``shardc explain``: why a parameter, a value, a module's output or a collective is as it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardc.cli import GOOD
from shardc.cli.arguments import command, compiling, count, written
from shardc.cli.compiled import compiled, progress, write
from shardc.language.errors import ShardingError, UsageError
from shardc.report.explain.alternatives import Alternative, alternatives_text

if TYPE_CHECKING:
    from shardc.api import Compiled
    from shardc.report.explain.advice import Advice
    from shardc.report.explain.explanation import Explanation

TRIES = 12

NAME_HELP = (
    "a parameter, an input, an output or a module of the model, or a value or a collective as shardc dump prints it; "
    "param:, input:, output:, module: or value: before it says which, where several are named so; gradient:NAME and, "
    "of a pipeline, stage:N"
)


def add(commands: Any) -> None:
    """The arguments of the command."""
    help_ = "say why a parameter, a value or a collective is as it is: the way back to your annotations"
    explain = written(compiling(command(commands, "explain", help_)), "explain")
    explain.add_argument("name", metavar="NAME", help=NAME_HELP)
    explain.add_argument("--format", choices=("text", "json"), default="text")
    explain.add_argument(
        "--try",
        dest="tries",
        metavar="N",
        type=count,
        default=TRIES,
        help=f"of a collective: compile again under at most N other annotations, to find what removes it ({TRIES})",
    )
    explain.add_argument(
        "--no-advice", dest="advice", action="store_false", help="of a collective: do not look for what removes it"
    )
    explain.add_argument("-v", "--verbose", action="store_true", help="long ways whole")


def run(options: argparse.Namespace) -> int:
    """Compile, and explain what is named."""
    program = compiled(options)
    try:
        found = program.explain(options.name)
    except ShardingError as error:
        raise UsageError(f"NAME {options.name!r}", error.what, error.problem, error.remedy) from None
    choices, advice = _of_collective(options, program, found)
    if options.format == "json":
        added = {"alternatives": list(map(asdict, choices)), "advice": advice and advice.record()}
        record = {"version": 1, **found.record(), **(added if found.kind == "collective" else {})}
        text = json.dumps(record, indent=1) + "\n"
    else:
        is_whole = options.target.startswith("hf:")  # there --annotate stands in place of what the target came with
        parts = [found.text(None if options.verbose else 10), alternatives_text(choices)]
        text = "\n".join(filter(None, [*parts, advice.text(is_whole) if advice else ""]))
    write(text, options.output)
    return GOOD


def _of_collective(
    options: argparse.Namespace, program: Compiled, found: Explanation
) -> tuple[tuple[Alternative, ...], Advice | None]:
    """What a collective was chosen among, and what would remove it; nothing of else, nor of a member of a bucket."""
    if found.sent is None:
        return (), None
    from shardc.report.explain.advice import advise
    from shardc.report.explain.alternatives import alternatives

    choices = alternatives(program, found.name)
    if not options.advice:
        return choices, None
    with progress(f"compiling again to find what removes {found.name} (--no-advice leaves that out)"):
        return choices, advise(program, found.name, options.tries)
