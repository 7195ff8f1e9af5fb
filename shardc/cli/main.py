"""The command line: runs the command that a user types after ``shardc``. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from shardc.cli import (
    BAD_ANNOTATION,
    CAPTURE_FAILED,
    GOOD,
    INTERNAL,
    INTERRUPTED,
    USAGE,
    bench_links,
    check,
    cost,
    diff,
    dump,
    explain,
    stages,
    suggest,
    trace,
    verify,
)
from shardc.cli.arguments import EXIT_CODES, Parser
from shardc.language.errors import CaptureError, OptionError, ShardingError, error_line, place_in_model
from shardc.language.text import printable

COMMANDS = {
    "dump": dump, "explain": explain, "check": check, "diff": diff, "cost": cost, "verify": verify, "stages": stages,
    "suggest": suggest, "trace": trace, "bench-links": bench_links,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Usage errors of argparse exit with 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for letters that the terminal lacks
    parser = Parser(prog="shardc", description="Shard a PyTorch model by a few annotations.", epilog=EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for command in COMMANDS.values():
            command.add(commands)
        return _run(parser.options(argv))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        print("shardc: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if place := place_in_model(error):
            remedy = "run the model eagerly on these inputs, and mend it"
            return _report(CaptureError(place, error_line(error), remedy), CAPTURE_FAILED)
        traceback.print_exc()
        return INTERNAL


def _run(options: argparse.Namespace) -> int:
    try:
        return COMMANDS[options.command].run(options)
    except OptionError as error:
        return _report(error, USAGE)
    except (CaptureError, NotImplementedError) as error:
        return _report(error, CAPTURE_FAILED)
    except ShardingError as error:
        return _report(error, BAD_ANNOTATION)
    except SystemExit as error:
        from shardc.capture.values.refusals import failing_line

        remedy = "raise an error there, or leave it out"
        return _report(CaptureError(failing_line(error), "it ends the process", remedy), CAPTURE_FAILED)


def _report(error: Exception, code: int) -> int:
    print(printable(f"shardc: {error}", keep="\n"), file=sys.stderr)
    return code
