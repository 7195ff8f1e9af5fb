"""A check before the first step that all ranks run the same collectives on the same mesh with the same versions."""

from __future__ import annotations

import hashlib
import platform
from itertools import zip_longest

import torch
from torch import Tensor, fx

from shardc.language.errors import ShardingError
from shardc.program.collective import EXCHANGES
from shardc.program.communication import members
from shardc.program.program import Program

from . import process_group
from .distributed import TorchComm


def check_agreement(comm: TorchComm, program: Program) -> None:
    """Compare a hash of the agreement text over all ranks of the mesh.

    If it differs, every rank raises a ShardingError that names two ranks and the first line in which they differ.
    """
    if comm.mesh.size == 1:
        return
    text = agreement_text(program)
    hashes = _from_all(comm, hashlib.sha256(text.encode()).digest())
    if bool((hashes == hashes[0]).all()):
        return
    texts = [bytes(row.tolist()).decode() for row in _padded_from_all(comm, text.encode())]
    position = next(i for i, other in enumerate(texts) if other != texts[0])
    raise _disagreement(comm, position, texts[0].rstrip("\0"), texts[position].rstrip("\0"))


def agreement_text(program: Program) -> str:
    """The lines that must be equal on all ranks: versions, the mesh, and every collective in order."""
    lines = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"mesh {program.mesh}"]
    for node in program.calls:
        if members(node) or node.target in EXCHANGES:
            kind, args = getattr(node.target, "__name__", ""), fx.map_arg(node.args, str)
            lines.append(f"{node.name} = {kind}{args}: {', '.join(map(str, program.types(node)))}")
    return "\n".join(lines)


def _from_all(comm: TorchComm, data: bytes) -> Tensor:
    """The bytes of all positions, one row each."""
    axes = tuple(comm.mesh.axis(name) for name in comm.mesh.axis_names)
    row = torch.tensor(list(data), dtype=torch.uint8, device=comm.device)
    return process_group.all_gather(row.unsqueeze(0), comm.group(axes), 0)().cpu()


def _padded_from_all(comm: TorchComm, data: bytes) -> Tensor:
    sizes = _from_all(comm, len(data).to_bytes(8, "big"))
    longest = max(int.from_bytes(bytes(row.tolist()), "big") for row in sizes)
    return _from_all(comm, data.ljust(longest, b"\0"))


def _disagreement(comm: TorchComm, position: int, first: str, second: str) -> ShardingError:
    ranks = comm.mesh.rank(0), comm.mesh.rank(position)
    pairs = zip_longest(first.splitlines(), second.splitlines(), fillvalue="nothing")
    one, other = next((a, b) for a, b in pairs if a != b)
    return ShardingError(
        f"ranks {ranks[0]} and {ranks[1]}", f"{comm.mesh}, about to run different programs",
        f"rank {ranks[0]} has\n    {one}\n  where rank {ranks[1]} has\n    {other}",
        "give every rank the same model, annotations, options and input shapes, and install the same versions",
    )  # fmt: skip
