"""``shardc suggest``: find the best plans for a model on a number of devices."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import DTYPES, add_command, add_output_options, add_search_options
from shardc.cli.compile import annotations_of, check_output, load, write
from shardc.language.cluster import cluster
from shardc.language.machine import Machine
from shardc.language.mesh import Mesh
from shardc.language.record import json_text
from shardc.language.text import printable
from shardc.options import Precision
from shardc.report.suggest.html import suggested_page
from shardc.report.suggest.records import Suggested
from shardc.report.suggest.text import suggested_text

HELP = "find the mesh, annotations and options that train a model fastest on so many devices, or in the least memory"
FORMS = {"text": suggested_text, "json": json_text, "html": suggested_page}


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "suggest", HELP, is_search=True)
    add_search_options(parser)
    add_output_options(
        parser, "suggest", tuple(FORMS), "html is a page for a browser, with a picture of times and memory"
    )


def run(options: argparse.Namespace) -> int:
    """Search, and write the best plans. CHECK_FAILED if none fits in memory; Ctrl-C writes the best so far."""
    check_output(options.output)
    machine = cluster(options.links, options.device, options.devices, options.nodes)
    found = _suggested(options, machine)
    write(FORMS[options.format](found), options.output)
    return CHECK_FAILED if found.suggestions[0].excess else GOOD


def _suggested(options: argparse.Namespace, machine: Machine) -> Suggested:
    """Load the target and search."""
    options.mesh, is_function = Mesh(device_ids=None, dp=options.devices), not options.target.startswith("hf:")
    batch = options.batch if is_function else None
    options.batch = None if is_function else options.batch  # a function makes its own inputs, which are resized
    target = load(options, device="meta")

    from shardc.search.suggest import suggest
    from shardc.search.suggestion import suggested

    start = time.perf_counter()

    def tell(what: str) -> None:
        print(printable(f"shardc: {what} ({time.perf_counter() - start:.0f} s)"), file=sys.stderr, flush=True)

    with redirect_stdout(sys.stderr):
        found = suggest(
            target.model, options.devices, args=target.args, kwargs=target.kwargs,
            annotations=annotations_of(options, replace(target, annotations={})), memory=options.memory, links=machine,
            nodes=options.nodes, batch=batch, fix=_fixed(options), objective=options.objective, wire=options.wire,
            optimizer=options.optimizer, top=options.top, jobs=options.jobs,
            progress=tell,
        )  # fmt: skip
    return suggested(found, type(target.model).__name__)


def _fixed(options: argparse.Namespace) -> dict[str, list[Any]]:
    """The allowed values of each name in ``--fix``, as ``suggest`` takes them."""
    fixed: dict[str, list[Any]] = {}
    for name, value in options.fix:
        fixed.setdefault(name, []).append(_precision(value) if name == "precision" and value else value)
    return fixed


def _precision(name: str) -> Precision:
    import torch

    return Precision(getattr(torch, DTYPES[name]))
