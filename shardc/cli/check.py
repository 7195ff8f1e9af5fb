"""``shardc check``: check a plan against budgets, for CI."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import add_command, add_compile_options, add_output_options, check_dumps, unreadable
from shardc.cli.compile import compiled, with_warnings, write
from shardc.language.errors import UsageError
from shardc.language.record import json_text
from shardc.report.dump.budget import SYNTAX, Budget, check, check_text
from shardc.report.dump.records import Dump
from shardc.report.dump.schema import is_dump, read_dump

HELP = "hold a plan against budgets: exit 1 where one is broken, and print what breaks it"


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "check", HELP)
    add_compile_options(parser, is_required=False)
    add_output_options(parser, "check", ("text", "json"))
    parser.epilog = f"{SYNTAX}\n{parser.epilog}"
    parser.add_argument(
        "--fail-on", metavar="BUDGET", action="append", default=[], type=_budget, dest="budgets",
        help="all_gather>10MB, wire@tp>1GB, collectives>20, fallback, ...; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", metavar="BYTES", action="append", dest="budgets", type=partial(_budget, prefix="memory>"),
        help="the most that one rank may hold, with the optimizer's state: 8GB",
    )  # fmt: skip


def _budget(text: str, prefix: str = "") -> Budget:
    try:
        return Budget.parse(prefix + text)
    except UsageError as error:
        raise unreadable(text, error.problem, error.remedy, error.what) from None


def run(options: argparse.Namespace) -> int:
    """Check the program, or its dump, against each budget."""
    if not options.budgets:
        what, remedy = "neither --fail-on nor --max-memory", "say --fail-on 'all_gather>10MB' or --max-memory 8GB"
        raise UsageError("check", what, "there is no budget to hold", remedy)
    dump = _dump(options)
    found = check(options.budgets, dump)
    text = with_warnings(check_text(found.budgets), dump.notes or ())
    write(json_text(found) if options.format == "json" else text, options.output)
    return CHECK_FAILED if found.is_broken else GOOD


def _dump(options: argparse.Namespace) -> Dump:
    if is_dump(options.target):
        check_dumps(options, [options.target])
        return read_dump(options.target)
    from shardc.report.dump.program_record import program_record

    if options.mesh is None:
        remedy = "say --mesh dp=2,tp=4; only a dump, FILE.json, needs none"
        raise UsageError("--mesh", options.target, "a target is compiled for a mesh", remedy)
    return program_record(compiled(options).whole)
