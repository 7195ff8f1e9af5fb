"""``shardc verify``: run the sharded program, the single device and the eager model, and compare their tensors."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import add_command, add_mesh_options
from shardc.cli.compile import annotations_of, compile_options, load, progress, write


def add(commands: Any) -> None:
    """Add the command."""
    help_ = "compare the sharded program with a single device, and that with the eager model: exit 1 where they differ"
    add_mesh_options(add_command(commands, "verify", help_))


def run(options: argparse.Namespace) -> int:
    """Compile, run and compare. CHECK_FAILED if a tensor differs."""
    from shardc.verify import differences_text, verify

    target = load(options, device="cpu")
    annotations = annotations_of(options, target)
    differences = verify(
        target.model, options.mesh, annotations, args=target.args, kwargs=target.kwargs, train=options.train,
        options=compile_options(options), progress=progress,
    )  # fmt: skip
    told = ""
    if options.wire:
        told += "\nvalues were sent as they are, where --wire sends codes: dump has the error of each codec\n"
    if options.local:
        told += "\none group of --local was compared, on its part of the batch; outer steps are left out\n"
    write(differences_text(differences) + told, None)
    return GOOD if all(each.is_small for each in differences) else CHECK_FAILED
