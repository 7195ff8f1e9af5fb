"""``shardc dump``: the program, its shardings and its collectives."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shardc.cli import GOOD
from shardc.cli.arguments import command, compiling, named, written
from shardc.cli.compiled import compiled, retyped, write
from shardc.language.errors import UsageError, did_you_mean
from shardc.program.text import TABLES

OWN = {  # options that explain lacks, and whether each has a value
    **dict.fromkeys(("--format", "--after", "--diff", "--only", "--output", "-o"), True),
    **dict.fromkeys(("--schema", "--verbose", "-v"), False),
}


def add(commands: Any) -> None:
    """The arguments of the command."""
    dump = written(compiling(command(commands, "dump", "print the program, its shardings and its collectives")), "dump")
    dump.add_argument(
        "--format",
        choices=("text", "json", "dot", "html"),
        default="text",
        help="dot is for graphviz; html is one page for a browser, with pictures and why everything is as it is",
    )
    which = dump.add_mutually_exclusive_group()
    which.add_argument("--after", metavar="PASS", type=named, help="the program as it stands after this pass")
    which.add_argument(
        "--diff",
        metavar="PASS[,PASS]",
        type=named,
        help="which values came, went and changed between two passes; one alone is held against the one before it",
    )
    dump.add_argument(
        "--only",
        metavar="TABLE|GLOB[,...]",
        type=named,
        help=f"leave out all else: of {', '.join(TABLES)}, or values and modules by name, as h.0.attn or '*norm*'",
    )
    dump.add_argument("-v", "--verbose", action="store_true", help="also the seconds that each pass took")


def run(options: argparse.Namespace) -> int:
    """Compile, and write what is asked for."""
    from shardc.report.dump.dump import dump
    from shardc.report.dump.pass_diff import dump_diff

    _check(options)
    found = compiled(options)
    if options.diff:
        text = dump_diff(found, options.diff, options.format, options.only or "")
    else:
        asking = retyped(options.typed, "explain", OWN)
        after, only = options.after or "", options.only or ""
        text = dump(found, options.format, after, only, options.verbose, asking)
    write(text, options.output)
    return GOOD


def _check(options: argparse.Namespace) -> None:
    """A UsageError for what needs no compiling to be refused."""
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
        name = next(each for each in ("--diff", "--only", "--format") if each in options.given)
        problem = "the seconds of each pass are for a whole dump, as text or JSON"
        raise UsageError("-v", f"with {name}", problem, f"leave -v or {name} out")


def _check_passes(option: str, given: Sequence[str]) -> None:
    from shardc.passes.order import PASSES

    names = ["capture", *(run.__name__ for run in PASSES)]
    for name in given:
        if name not in names:
            what, remedy = f"the passes are {', '.join(names)}", did_you_mean(name, names) or "name one of them"
            raise UsageError(f"{option} {name!r}", what, "there is no such pass", remedy)
