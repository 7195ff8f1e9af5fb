"""The exchange of short messages between all ranks of a mesh, over a process group that nothing else uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from ..comm.failure import announce, job_timeout, meet, waiting

AGREEMENT = "the agreement of all ranks on what they run"
FRAME = 256  # bytes of a message that goes in one round, four of them its length


class Agreement:
    """Lets all ranks of a mesh exchange messages. ``ranks``: theirs in the job, in order.

    The group is gloo's, on every device: no message can pair with a collective of a program or of the user, and none
    waits for an accelerator. It has the timeout of the job.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._frames = _Frames(FRAME, len(self.ranks))
        announce(self)

    @property
    def process_groups(self) -> list[Any]:
        """The one that this process may wait on, once it is made."""
        return [self._group] if "_group" in self.__dict__ else []

    @cached_property
    def _group(self) -> Any:
        """The process group, which all ranks make together when the first message is exchanged."""
        meet(self.ranks, AGREEMENT)
        store = PrefixStore(f"shardc/agreement/{'-'.join(map(str, self.ranks))}", default_store())
        return ProcessGroupGloo(store, self.ranks.index(dist.get_rank()), len(self.ranks), job_timeout())

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes that every rank passes to this call, in the order of ``ranks``.

        One round for up to 252 bytes, else two. Raises a CommunicationError if a rank is gone, or after the job's
        timeout.
        """
        frames = self._gather(self._frames, len(data).to_bytes(4, "big") + data[: FRAME - 4])
        sizes = [int.from_bytes(frame[:4], "big") for frame in frames]
        longest = max(sizes)
        if longest > FRAME - 4:
            frames = [b"    " + frame for frame in self._gather(_Frames(longest, len(self.ranks)), data)]
        return [frame[4 : 4 + size] for frame, size in zip(frames, sizes, strict=True)]

    def _gather(self, frames: _Frames, data: bytes) -> list[bytes]:
        """The frames of all ranks; every wait of an agreement is here."""
        frames.sent[: len(data)] = data
        with waiting(lambda: AGREEMENT, self.ranks):
            self._group._allgather_base(frames.receiver, frames.sender).wait()
        received, size = bytes(frames.received), len(frames.sent)
        return [received[start : start + size] for start in range(0, len(received), size)]


class _Frames:
    """Memory for one message of each rank, which torch sees as tensors."""

    def __init__(self, size: int, count: int) -> None:
        self.sent, self.received = bytearray(size), bytearray(size * count)
        self.sender = torch.frombuffer(self.sent, dtype=torch.uint8)
        self.receiver = torch.frombuffer(self.received, dtype=torch.uint8)


_agreements: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Agreement]] = WeakKeyDictionary()


def agreement_on(device_mesh: DeviceMesh) -> Agreement | None:
    """The agreement of the ranks of a mesh; None for a single rank, and for a job of fake processes.

    All modules on the same ranks share one, so that calls in another order on one rank meet, and are seen to differ. It
    lives as long as the job's default process group.
    """
    ranks = tuple(sorted(device_mesh.mesh.flatten().tolist()))
    job = dist.group.WORLD
    if len(ranks) == 1 or job is None or dist.get_backend() == "fake":
        return None
    known = _agreements.setdefault(job, {})
    if ranks not in known:
        known[ranks] = Agreement(ranks)
    return known[ranks]


def default_store() -> Any:
    """The store through which the ranks of the job find each other."""
    return dist.distributed_c10d._get_default_store()
