"""``shardc dump``: the program, its shardings and its collectives."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.arguments import command, compiling, written
from shardc.error import did_you_mean
from shardc.invocation import compiled, write
from shardc.outcome import GOOD, UsageError
from shardc.text import TABLES


def add(commands: Any) -> None:
    """The arguments of the command."""
    dump = written(compiling(command(commands, "dump", "print the program, its shardings and its collectives")))
    dump.add_argument("--format", choices=("text", "json", "dot", "html"), default="text")
    dump.add_argument("--after", metavar="PASS", default="", help="the program as it stands after this pass")
    dump.add_argument(
        "--only",
        metavar="TABLE|GLOB[,...]",
        default="",
        help=f"leave out all else: of {', '.join(TABLES)}, or values and modules by name, as h.0.attn or '*norm*'",
    )
    dump.add_argument("-v", "--verbose", action="store_true", help="also the seconds that each pass took")


def run(options: argparse.Namespace) -> int:
    """Compile, and write what is asked for."""
    from shardc.dump import dump

    _check_pass(options.after)
    found = compiled(options)
    write(dump(found, options.format, options.after, options.only, options.verbose), options.output)
    return GOOD


def _check_pass(name: str) -> None:
    from shardc.passes.pipeline import PASSES

    names = ["capture", *(run.__name__ for run in PASSES)]
    if name and name not in names:
        what, remedy = f"the passes are {', '.join(names)}", did_you_mean(name, names) or "name one of them"
        raise UsageError(f"--after {name!r}", what, "there is no such pass", remedy)
