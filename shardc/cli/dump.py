"""``shardc dump``: the program, its shardings and its collectives."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import add_command, add_compile_options, add_output_options, name
from shardc.cli.compile import compiled, retyped, write
from shardc.language.errors import UsageError, did_you_mean
from shardc.report.dump.schema import FORMATS, TABLES

LACKED_BY_EXPLAIN = {  # options of dump that explain lacks, and whether each takes a value
    **dict.fromkeys(("--format", "--after", "--diff", "--only", "--output", "-o"), True),
    **dict.fromkeys(("--schema", "--verbose", "-v"), False),
}


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "dump", "print the program, its shardings and its collectives")
    add_compile_options(parser)
    add_output_options(
        parser, "dump", FORMATS, "dot is for Graphviz; html is a page for a browser, with pictures and explanations"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--after", metavar="PASS", type=name, help="print the program after this pass")
    which.add_argument(
        "--diff", metavar="PASS[,PASS]", type=name,
        help="print which values came, went and changed between two passes, or between a pass and the one before it",
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="TABLE|GLOB[,...]", type=name,
        help=f"print these tables alone ({', '.join(TABLES)}), or these values and modules, as h.0.attn or '*norm*'",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the seconds of each pass")


def run(options: argparse.Namespace) -> int:
    """Compile, and write the program or the difference of two passes."""
    from shardc.report.dump.dump import dump
    from shardc.report.dump.pass_diff import dump_diff

    _check(options)
    program = compiled(options)
    if options.diff:
        text = dump_diff(program, options.diff, options.format, options.only or "")
    else:
        explain = retyped(options.typed, "explain", LACKED_BY_EXPLAIN)
        text = dump(program, options.format, options.after or "", options.only or "", options.verbose, explain)
    write(text, options.output)
    return GOOD


def _check(options: argparse.Namespace) -> None:
    """Raise a UsageError for options that do not fit each other, before anything is compiled."""
    passes = options.diff.split(",") if options.diff else []
    _check_passes("--after", [options.after] if options.after else [])
    _check_passes("--diff", passes)
    if len(passes) > 2:
        what, problem = f"{len(passes)} passes", "a difference is between two"
        raise UsageError(f"--diff {options.diff!r}", what, problem, f"say --diff {passes[0]},{passes[-1]}")
    if options.diff and options.format not in ("text", "json"):
        what, remedy = f"with --format {options.format}", "say --format text or json"
        raise UsageError(f"--diff {options.diff}", what, "a difference is a listing", remedy)
    if options.verbose and (options.diff or options.only or options.format in ("dot", "html")):
        option = next(each for each in ("--diff", "--only", "--format") if each in options.changed)
        problem = "the seconds of each pass are for a whole dump, as text or JSON"
        raise UsageError("-v", f"with {option}", problem, f"leave -v or {option} out")


def _check_passes(option: str, typed: Sequence[str]) -> None:
    from shardc.passes.order import PASSES

    known = ["capture", *(run.__name__ for run in PASSES)]
    for each in typed:
        if each not in known:
            what, remedy = f"the passes are {', '.join(known)}", did_you_mean(each, known) or "name one of them"
            raise UsageError(f"{option} {each!r}", what, "there is no such pass", remedy)
