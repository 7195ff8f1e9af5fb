"""The processes that save or load together: short texts from each to all, on a group of their own.

The group is no other's, so that a save may go on in a thread beside the collectives of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from shardc.language.errors import CheckpointError

from ..agreement.agreement import default_store
from ..comm.failure import announce, job_timeout, meet, waiting
from ..module.module import ParallelModule
from ..pipeline.conversion import PipelineConversion
from .file import bytes_of

CHECKPOINT = "the checkpoint of all ranks"


class Ranks:
    """The ranks of a job, and this process's place among them. One process alone has no group."""

    def __init__(self, ranks: tuple[int, ...] = (0,), index: int = 0, group: Any = None) -> None:
        self.ranks, self.index, self.group = ranks, index, group
        if group is not None:
            announce(self)

    @property
    def process_groups(self) -> list[Any]:
        """Those that this process may wait on."""
        return [self.group] if self.group is not None else []

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the index, and publishes."""
        return self.index == 0

    def share(self, text: str) -> str:
        """The first rank's text, on every rank."""
        if self.group is None:
            return text
        data = text.encode() if self.is_first else b""
        size = torch.tensor([len(data)])
        with waiting(lambda: CHECKPOINT, self.ranks):
            self.group.broadcast(size, 0).wait()
            row = _row(data, int(size))
            self.group.broadcast(row, 0).wait()
        return bytes(bytes_of(row)).decode()

    def collect(self, text: str) -> list[str]:
        """On the first rank the texts of all ranks, by index; elsewhere nothing."""
        if self.group is None:
            return [text]
        texts, data, size = [text], text.encode(), torch.tensor([0])
        with waiting(lambda: CHECKPOINT, self.ranks):
            if not self.is_first:
                self.group.send([torch.tensor([len(data)])], 0, 0).wait()
                self.group.send([_row(data, len(data))], 0, 0).wait()
                return []
            for index in range(1, len(self.ranks)):
                self.group.recv([size], index, 0).wait()
                row = _row(b"", int(size))
                self.group.recv([row], index, 0).wait()
                texts.append(bytes(bytes_of(row)).decode())
        return texts

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if one has an error: its own where it has one, else that of the first that has."""
        texts = self.collect("" if error is None else as_text(error))
        failed = next(((rank, each) for rank, each in zip(self.ranks, texts, strict=False) if each), None)
        verdict = self.share("" if failed is None else json.dumps(failed))
        if error is not None:
            raise error
        if verdict:
            rank, text = json.loads(verdict)
            raise from_text(text, f"on rank {rank}: ")


def as_text(error: Exception) -> str:
    """An error, to be raised on another rank."""
    if not isinstance(error, CheckpointError):
        error = CheckpointError(type(error).__name__, str(error), "it was raised on that rank", "see its traceback")
    return json.dumps([error.who, error.what, error.problem, error.remedy])


def from_text(text: str, place: str = "") -> CheckpointError:
    """The error that ``as_text`` wrote."""
    who, what, problem, remedy = json.loads(text)
    return CheckpointError(who, place + what, problem, remedy)


_jobs: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Ranks]] = WeakKeyDictionary()


def ranks_of(module: nn.Module) -> Ranks:
    """The ranks that hold a module: those of its mesh, or of the job for a plain one, which every rank has whole.

    Every one of them calls this the first time, which makes their group; it lives as long as the job.
    """
    ranks, job = tuple(_mesh_ranks(module)), dist.group.WORLD
    if len(ranks) == 1 or job is None or dist.get_backend() == "fake":
        return Ranks(ranks[:1])
    known = _jobs.setdefault(job, {})
    if ranks not in known:
        meet(ranks, CHECKPOINT)
        store = PrefixStore(f"shardc/checkpoint/{'-'.join(map(str, ranks))}", default_store())
        index = ranks.index(dist.get_rank())
        known[ranks] = Ranks(ranks, index, ProcessGroupGloo(store, index, len(ranks), job_timeout()))
    return known[ranks]


def _mesh_ranks(module: nn.Module) -> Sequence[int]:
    if isinstance(module, ParallelModule):
        conversion: Any = module._conversion
        mesh = conversion.job.device_mesh if isinstance(conversion, PipelineConversion) else None
        mesh = mesh or getattr(conversion, "device_mesh", None)
        return [0] if mesh is None else sorted(mesh.mesh.flatten().tolist())
    meshes = {each.device_mesh for each in module.parameters() if isinstance(each, DTensor)}
    if meshes:
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def _row(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
