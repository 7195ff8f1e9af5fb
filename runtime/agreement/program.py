"""Compares the program that a rank is about to run with those of the others."""

from __future__ import annotations

import hashlib
import platform
from itertools import zip_longest

import torch
from torch import fx

from shardc.language.errors import ShardingError
from shardc.program.collective import EXCHANGES
from shardc.program.communication import members
from shardc.program.program import Program

from .agreement import Agreement


def check_agreement(agreement: Agreement, program: Program) -> None:
    """Compare a hash of what must be equal on all ranks: versions, the mesh, and every collective in order.

    If it differs, every rank raises a ShardingError that names two ranks and the first line in which they differ.
    """
    lines = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"mesh {program.mesh}"]
    for node in program.calls:
        if members(node) or node.target in EXCHANGES:
            kind, args = getattr(node.target, "__name__", ""), fx.map_arg(node.args, str)
            lines.append(f"{node.name} = {kind}{args}: {', '.join(map(str, program.types(node)))}")
    text = "\n".join(lines).encode()
    hashes = agreement.exchange(hashlib.sha256(text).digest())
    if len(set(hashes)) == 1:
        return
    texts = [each.decode() for each in agreement.exchange(text)]
    index = next(i for i, other in enumerate(texts) if other != texts[0])
    pairs = zip_longest(*(texts[i].splitlines() for i in (0, index)), fillvalue="nothing")
    one, other = next((a, b) for a, b in pairs if a != b)
    ranks = agreement.ranks[0], agreement.ranks[index]
    raise ShardingError(
        f"ranks {ranks[0]} and {ranks[1]}", f"{program.mesh}, about to run different programs",
        f"rank {ranks[0]} has\n    {one}\n  where rank {ranks[1]} has\n    {other}",
        "give every rank the same model, annotations, options and input shapes, and install the same versions",
    )  # fmt: skip
