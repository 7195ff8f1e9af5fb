"""``shardc verify``: the sharded program beside a single device, and that beside the eager model."""

from __future__ import annotations

import argparse
from typing import Any

from shardc.arguments import command, meshed
from shardc.invocation import annotations_of, compile_options, load, progress, write
from shardc.outcome import CHECK_FAILED, GOOD


def add(commands: Any) -> None:
    """The arguments of the command."""
    meshed(command(commands, "verify", "hold the sharded program against a single device, and against the eager model"))


def run(options: argparse.Namespace) -> int:
    """Compile, run both ways and compare: CHECK_FAILED where they differ."""
    from shardc.verify import differences_text, verify

    target = load(options, device="cpu")
    annotations = annotations_of(options, target)
    found = verify(
        target.model,
        options.mesh,
        annotations,
        args=target.args,
        kwargs=target.kwargs,
        train=options.train,
        options=compile_options(options),
        progress=progress,
    )
    write(differences_text(found), None)
    return GOOD if all(difference.is_small for difference in found) else CHECK_FAILED
