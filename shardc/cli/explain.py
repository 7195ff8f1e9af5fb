"""``shardc explain``: why a parameter, a value, a module's output or a collective is as it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardc.cli import GOOD
from shardc.cli.arguments import add_command, add_compile_options, add_output_options, count
from shardc.cli.compile import compiled, progress, with_warnings, write
from shardc.language.errors import ShardingError, UsageError
from shardc.language.record import json_of
from shardc.report.explain.explanation import Explanation
from shardc.report.explain.records import Advice, Alternative, Explained, ExplainedCollective, alternatives_text

if TYPE_CHECKING:
    from shardc.api import Compiled

TRIES = 12
LONGEST_CHAIN = 10  # steps, without --verbose
NAME_HELP = (
    "a parameter, input, output or module of the model, or a value or collective as shardc dump prints it; where "
    "several have the name, write param:, input:, output:, module: or value: before it; also gradient:NAME and, of a "
    "pipeline, stage:N"
)


def add(commands: Any) -> None:
    """Add the command."""
    help_ = "explain why a parameter, a value or a collective is as it is: the way back to your annotations"
    parser = add_command(commands, "explain", help_)
    add_compile_options(parser)
    add_output_options(parser, "explain", ("text", "json"))
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.add_argument(
        "--try", dest="tries", metavar="N", type=count, default=TRIES,
        help=f"for a collective: compile at most N changes of annotations to find one that removes it ({TRIES})",
    )  # fmt: skip
    parser.add_argument(
        "--no-advice", dest="advice", action="store_false", help="for a collective: do not look for what removes it"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print long chains whole")


def run(options: argparse.Namespace) -> int:
    """Compile, and write the explanation of NAME."""
    program = compiled(options)
    try:
        explanation = program.explain(options.name)
    except ShardingError as error:
        raise UsageError(f"NAME {options.name!r}", error.what, error.problem, error.remedy) from None
    choices, advice = _of_collective(options, program, explanation)
    if options.format == "json":
        text = json.dumps(json_of(_record(explanation, choices, advice)), indent=1) + "\n"
    else:
        replaces = options.target.startswith("hf:")  # there --annotate replaces the target's annotations
        parts = [explanation.text(None if options.verbose else LONGEST_CHAIN), alternatives_text(choices)]
        text = "\n".join(filter(None, [*parts, advice.text(replaces) if advice else ""]))
        text = with_warnings(text, program.whole.notes)
    write(text, options.output)
    return GOOD


def _record(explanation: Explanation, choices: tuple[Alternative, ...], advice: Advice | None) -> Explained:
    own = {field.name: getattr(explanation, field.name) for field in fields(explanation) if field.init}
    if explanation.kind != "collective":
        return Explained(**own)
    return ExplainedCollective(**own, alternatives=choices, advice=advice)


def _of_collective(
    options: argparse.Namespace, program: Compiled, explanation: Explanation
) -> tuple[tuple[Alternative, ...], Advice | None]:
    """The alternatives to a collective, and advice to remove it. A member of a bucket has neither."""
    if explanation.sent is None:
        return (), None
    from shardc.report.explain.alternatives import alternatives

    name = explanation.name
    choices = alternatives(program, name)
    if not options.advice:
        return choices, None
    with progress(f"compiling again to find what removes {name} (--no-advice leaves that out)"):
        return choices, program.advise(name, options.tries)
