"""``shardc diff``: compare two plans."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import add_command, add_compile_options, add_output_options, check_dumps
from shardc.cli.compile import compiled, write
from shardc.language.errors import UsageError
from shardc.language.record import json_text
from shardc.report.dump.diff import diff, diff_text, is_same
from shardc.report.dump.records import Dump
from shardc.report.dump.schema import is_dump, read_dump

if TYPE_CHECKING:
    from shardc.api import Compiled

HELP = "compare two plans: which collectives came, went and grew, and every other difference; exit 1 where they differ"
OPERANDS = """\
A and B are each a dump (FILE.json, from shardc dump --format json), which takes no time to read; or a TARGET, which is
compiled for --mesh; or TARGET@PASS, the program after that pass. In a table - marks what went, + what came.

"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "diff", HELP, ("A", "B"))
    add_compile_options(parser, is_required=False)
    add_output_options(parser, "diff", ("text", "json"))
    parser.epilog = OPERANDS + str(parser.epilog)


def run(options: argparse.Namespace) -> int:
    """Compare, and write the difference. GOOD if there is none, as with the shell's ``diff``."""
    if is_dump(options.a) and is_dump(options.b):
        check_dumps(options, [options.a, options.b])
    targets: dict[str, Compiled] = {}
    before, after = (_dump(options, each, targets) for each in (options.a, options.b))
    difference = diff(before, after)
    write(json_text(difference) if options.format == "json" else diff_text(difference), options.output)
    return GOOD if is_same(difference) else CHECK_FAILED


def _dump(options: argparse.Namespace, operand: str, targets: dict[str, Compiled]) -> Dump:
    """The dump of an operand. ``targets``: a cache of compiled targets."""
    if is_dump(operand):
        return read_dump(operand)
    from shardc.report.dump.program_record import program_record

    if options.mesh is None:
        remedy = "say --mesh dp=2,tp=4; only dumps, FILE.json, need none"
        raise UsageError("--mesh", operand, "a target is compiled for a mesh", remedy)
    target, _, name = operand.partition("@")
    if target not in targets:
        targets[target] = compiled(argparse.Namespace(**{**vars(options), "target": target}))
    return program_record(targets[target].at(name) if name else targets[target].whole)
