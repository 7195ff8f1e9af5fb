"""``shardc dump``: the program, its shardings and its collectives."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from shardc.arguments import command, compiling, written
from shardc.error import did_you_mean
from shardc.invocation import compiled, retyped, write
from shardc.outcome import GOOD, UsageError
from shardc.text import TABLES

OWN = {  # options that explain lacks, and whether each has a value
    **dict.fromkeys(("--format", "--after", "--diff", "--only", "--output", "-o"), True),
    **dict.fromkeys(("--schema", "--verbose", "-v"), False),
}


def add(commands: Any) -> None:
    """The arguments of the command."""
    dump = written(compiling(command(commands, "dump", "print the program, its shardings and its collectives")))
    dump.add_argument(
        "--format",
        choices=("text", "json", "dot", "html"),
        default="text",
        help="dot is for graphviz; html is one page for a browser, with pictures and why everything is as it is",
    )
    which = dump.add_mutually_exclusive_group()
    which.add_argument("--after", metavar="PASS", default="", help="the program as it stands after this pass")
    which.add_argument(
        "--diff",
        metavar="PASS[,PASS]",
        default="",
        help="which values came, went and changed between two passes; one alone is held against the one before it",
    )
    dump.add_argument(
        "--only",
        metavar="TABLE|GLOB[,...]",
        default="",
        help=f"leave out all else: of {', '.join(TABLES)}, or values and modules by name, as h.0.attn or '*norm*'",
    )
    dump.add_argument("--schema", action=_Schema, nargs=0, help="print the JSON Schema of --format json, and no more")
    dump.add_argument("-v", "--verbose", action="store_true", help="also the seconds that each pass took")


def run(options: argparse.Namespace) -> int:
    """Compile, and write what is asked for."""
    from shardc.dump import dump
    from shardc.dump_diff import dump_diff

    _check_passes("--after", [options.after] if options.after else [])
    _check_passes("--diff", options.diff.split(",") if options.diff else [])
    found = compiled(options)
    if options.diff:
        text = dump_diff(found, options.diff, options.format, options.only)
    else:
        asking = retyped(options.typed, "explain", OWN)
        text = dump(found, options.format, options.after, options.only, options.verbose, asking)
    write(text, options.output)
    return GOOD


def _check_passes(option: str, given: Sequence[str]) -> None:
    from shardc.passes.pipeline import PASSES

    names = ["capture", *(run.__name__ for run in PASSES)]
    for name in given:
        if name not in names:
            what, remedy = f"the passes are {', '.join(names)}", did_you_mean(name, names) or "name one of them"
            raise UsageError(f"{option} {name!r}", what, "there is no such pass", remedy)


class _Schema(argparse.Action):
    """Prints the schema and ends, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *further: Any) -> None:
        print((files("shardc") / "dump.schema.json").read_text(encoding="utf-8"), end="")
        parser.exit()
