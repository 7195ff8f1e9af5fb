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
    """Compare a hash of what must be equal on all ranks: versions, the mesh, and every collective in order.

    If it differs, every rank raises a ShardingError that names two ranks and the first line in which they differ.
    """
    if comm.mesh.size == 1:
        return
    lines = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"mesh {program.mesh}"]
    for node in program.calls:
        if members(node) or node.target in EXCHANGES:
            kind, args = getattr(node.target, "__name__", ""), fx.map_arg(node.args, str)
            lines.append(f"{node.name} = {kind}{args}: {', '.join(map(str, program.types(node)))}")
    text = "\n".join(lines).encode()
    hashes = _from_all(comm, hashlib.sha256(text).digest())
    if bool((hashes == hashes[0]).all()):
        return
    sizes = [int.from_bytes(bytes(row.tolist()), "big") for row in _from_all(comm, len(text).to_bytes(8, "big"))]
    texts = [bytes(row.tolist()).decode() for row in _from_all(comm, text.ljust(max(sizes), b"\0"))]
    position = next(i for i, other in enumerate(texts) if other != texts[0])
    pairs = zip_longest(*(texts[i].rstrip("\0").splitlines() for i in (0, position)), fillvalue="nothing")
    one, other = next((a, b) for a, b in pairs if a != b)
    ranks = comm.mesh.rank(0), comm.mesh.rank(position)
    raise ShardingError(
        f"ranks {ranks[0]} and {ranks[1]}", f"{comm.mesh}, about to run different programs",
        f"rank {ranks[0]} has\n    {one}\n  where rank {ranks[1]} has\n    {other}",
        "give every rank the same model, annotations, options and input shapes, and install the same versions",
    )  # fmt: skip


def _from_all(comm: TorchComm, data: bytes) -> Tensor:
    """The bytes of all positions, one row each."""
    axes = tuple(comm.mesh.axis(name) for name in comm.mesh.axis_names)
    row = torch.tensor(list(data), dtype=torch.uint8, device=comm.device)
    return process_group.all_gather(row.unsqueeze(0), comm.group(axes), 0)().cpu()
