"""``shardc diff``: what lies between two plans."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import check_dumps, command, compiling, written
from shardc.cli.compiled import compiled, write
from shardc.language.errors import UsageError
from shardc.language.text import json_text
from shardc.report.dump.diff import diff, is_same
from shardc.report.dump.diff_text import diff_text
from shardc.report.dump.json import is_dump, read_dump

if TYPE_CHECKING:
    from shardc.api import Compiled

HELP = "say what lies between two plans: which collectives came, went and grew, and all else; exit 1 where they differ"
OPERANDS = """\
A and B are each a dump (FILE.json, of shardc dump --format json), which takes no time to read, or a TARGET, compiled
for --mesh, or TARGET@PASS, as it stands after that pass. In a table what went has -, what came +.

"""


def add(commands: Any) -> None:
    """The arguments of the command."""
    found = written(compiling(command(commands, "diff", HELP, ("A", "B")), is_required=False), "diff")
    found.epilog = OPERANDS + str(found.epilog)
    found.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Compare; GOOD where both are the same, as of ``diff``."""
    if is_dump(options.a) and is_dump(options.b):
        check_dumps(options, [options.a, options.b])
    known: dict[str, Compiled] = {}
    before, after = (_record(options, each, known) for each in (options.a, options.b))
    difference = diff(before, after)
    write(json_text(difference) if options.format == "json" else diff_text(difference), options.output)
    return GOOD if is_same(difference) else CHECK_FAILED


def _record(options: argparse.Namespace, operand: str, known: dict[str, Compiled]) -> dict[str, Any]:
    """The JSON form of an operand; ``known`` are the targets that were compiled for the other."""
    if is_dump(operand):
        return read_dump(operand)
    from shardc.report.dump.json import program_json

    if options.mesh is None:
        what, remedy = operand, "say --mesh dp=2,tp=4; only dumps, FILE.json, need none"
        raise UsageError("--mesh", what, "a target is compiled for a mesh", remedy)
    target, _, name = operand.partition("@")
    if target not in known:
        known[target] = compiled(argparse.Namespace(**{**vars(options), "target": target}))
    record = program_json(known[target].at(name) if name else known[target].whole)
    return dict(json.loads(json_text(record)))  # as a file has it: lists for tuples
