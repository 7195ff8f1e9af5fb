"""The processes that save or load together: they exchange short texts over a process group of their own.

Nothing else uses the group, so that a save may go on in a thread during the collectives of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardc.language.errors import CheckpointError

from ..agreement.agreement import Agreement
from ..agreement.entry import Entry, Kind
from ..agreement.gate import digest
from ..comm.checksum import bytes_of
from ..comm.failure import waiting
from ..module.module import ParallelModule
from ..pipeline.conversion import PipelineConversion

CHECKPOINT = "the checkpoint of all ranks"


class Ranks:
    """The ranks of a job, and this process's index among them. A single process has no agreement."""

    def __init__(self, ranks: tuple[int, ...] = (0,), agreement: Agreement | None = None) -> None:
        self.ranks, self.agreement = ranks, agreement
        self.index = 0 if agreement is None else agreement.index

    @property
    def group(self) -> Any:
        """The process group of these ranks."""
        assert self.agreement is not None, self.ranks
        return self.agreement.group

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the index and publishes."""
        return self.index == 0

    def agree(self, error: Exception | None, text: str = "") -> list[str]:
        """Exchange texts; return those of all ranks, by index. If some ranks have errors, all ranks raise.

        A rank with an error raises its own, others raise the first one.
        """
        message = json.dumps([None if error is None else parts_of(error), text])
        data = message.encode()
        answers = [json.loads(each) for each in (self.agreement.exchange(data) if self.agreement else [data])]
        if error is not None:
            raise error
        for rank, (parts, _) in zip(self.ranks, answers, strict=True):
            if parts is not None:
                who, what, problem, remedy = parts
                raise CheckpointError(who, f"on rank {rank}: {what}", problem, remedy)
        return [text for _, text in answers]

    def collect(self, text: str) -> list[str]:
        """Send texts to the first rank, which gets those of all ranks, by index; others get an empty list."""
        if self.agreement is None:
            return [text]
        texts, data, size = [text], text.encode(), torch.tensor([0])
        with waiting(lambda: CHECKPOINT, self.ranks):
            if not self.is_first:
                self.group.send([torch.tensor([len(data)])], 0, 0).wait()
                self.group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], 0, 0).wait()
                return []
            for index in range(1, len(self.ranks)):
                self.group.recv([size], index, 0).wait()
                row = torch.empty(int(size), dtype=torch.uint8)
                self.group.recv([row], index, 0).wait()
                texts.append(bytes(bytes_of(row)).decode())
        return texts


def parts_of(error: Exception) -> tuple[str, str, str, str]:
    """The four parts of an error, to be raised on another rank."""
    if isinstance(error, CheckpointError):
        return error.parts
    return (type(error).__name__, str(error), "it was raised on that rank", "see its traceback")


_jobs: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Ranks]] = WeakKeyDictionary()


def ranks_of(module: nn.Module, doing: str) -> Ranks:
    """The ranks that hold a module: those of its mesh, or all of the job for a plain one, which every rank has whole.

    All of them must make the first call, which makes their process group; it lives as long as the job. The ranks of a
    parallel module compare each call at its gate. ``doing``: ``saves``, ``loads`` or ``exports``.
    """
    gate = module.shardc.gate if isinstance(module, ParallelModule) else None
    if gate is not None:
        entry = Entry(Kind.CHECKPOINT, gate.digest, request=digest(doing))
        gate.enter(entry, {"request": lambda: f"checkpoint: {doing}"})
    ranks, job = tuple(_mesh_ranks(module)), dist.group.WORLD
    if len(ranks) == 1 or job is None or dist.get_backend() == "fake":
        return Ranks(ranks[:1])
    known = _jobs.setdefault(job, {})
    if ranks not in known:
        agreement = Agreement(ranks, "checkpoint", CHECKPOINT)
        agreement.connect()  # now, and not later in a thread
        known[ranks] = Ranks(ranks, agreement)
    return known[ranks]


def _mesh_ranks(module: nn.Module) -> Sequence[int]:
    if isinstance(module, ParallelModule):
        conversion: Any = module.shardc.conversion
        mesh = conversion.job.device_mesh if isinstance(conversion, PipelineConversion) else None
        mesh = mesh or getattr(conversion, "device_mesh", None)
        return [0] if mesh is None else sorted(mesh.mesh.flatten().tolist())
    meshes = {each.device_mesh for each in module.parameters() if isinstance(each, DTensor)}
    if meshes:
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def group_of(module: nn.Module) -> int:
    """The index of this rank's group, if several groups train a module by themselves; 0 if all train it together."""
    outer = module.shardc.outer if isinstance(module, ParallelModule) else None
    return 0 if outer is None else outer.groups.index
