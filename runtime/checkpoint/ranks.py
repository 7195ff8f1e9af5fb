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
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardc.language.errors import CheckpointError

from ..comm.checksum import bytes_of
from ..comm.failure import announce, own_group, waiting
from ..module.module import ParallelModule
from ..pipeline.conversion import PipelineConversion

CHECKPOINT = "the checkpoint of all ranks"
FRAME = 1024  # bytes of a message that goes in one round


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

    def agree(self, error: Exception | None, text: str = "") -> list[str]:
        """The texts of all ranks, by index; if one has an error, raise on each its own, or that of the first."""
        message = json.dumps([None if error is None else parts_of(error), text])
        answers = [json.loads(each) for each in self._exchange(message.encode())]
        if error is not None:
            raise error
        for rank, (parts, _) in zip(self.ranks, answers, strict=True):
            if parts is not None:
                who, what, problem, remedy = parts
                raise CheckpointError(who, f"on rank {rank}: {what}", problem, remedy)
        return [text for _, text in answers]

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

    def _exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks: in one round, or two if they are long."""
        if self.group is None:
            return [data]
        frames = self._gather(len(data).to_bytes(8, "little") + data, FRAME)
        longest = max(int.from_bytes(frame[:8], "little") for frame in frames) + 8
        if longest > FRAME:
            frames = self._gather(len(data).to_bytes(8, "little") + data, longest)
        return [frame[8 : 8 + int.from_bytes(frame[:8], "little")] for frame in frames]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        sent = _row(data[:size].ljust(size, b"\0"), size)
        received = sent.new_empty(size * len(self.ranks))
        with waiting(lambda: CHECKPOINT, self.ranks):
            self.group._allgather_base(received, sent).wait()
        return [bytes(bytes_of(each)) for each in received.split(size)]


def parts_of(error: Exception) -> list[str]:
    """The four parts of an error, to be raised on another rank."""
    if isinstance(error, CheckpointError):
        return [error.who, error.what, error.problem, error.remedy]
    return [type(error).__name__, str(error), "it was raised on that rank", "see its traceback"]


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
        known[ranks] = Ranks(ranks, ranks.index(dist.get_rank()), own_group("checkpoint", ranks, CHECKPOINT))
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
