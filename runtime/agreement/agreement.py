"""The exchange of short messages between all ranks of a mesh, over a process group that nothing else uses."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardc.language.errors import RankError, error_line

from ..comm.failure import announce, own_group, waiting

AGREEMENT = "the agreement of all ranks"
HEAD = 4  # bytes of the length of a message
FRAME = 256  # bytes of a message that one round can send, with its length
FAILED = 2**32 - 1  # in place of a length: the rank has failed, and its message follows
PAGE = 4096  # bytes of the message of a rank that has failed
Doing = Callable[[], str] | None  # what a rank is about to do, such as ``calls forward of GPT``
PATIENCE = 3.0  # seconds that a failed rank waits for the others to read its message


class Agreement:
    """Lets all ranks of a mesh exchange messages. ``ranks``: their numbers in the job, in order.

    The group uses gloo on every device: no message can pair with a collective of a program or of the user, and none
    waits for an accelerator. It has the timeout of the job. ``purpose``: what the group is for; each purpose has a
    group of its own. ``who``: the users of the group, for errors. ``num_modules``: under ``""`` the number of modules
    made on these ranks so far, under a module's number that of its copies. ``num_meetings``: the number of attempts to
    make a module.
    """

    def __init__(self, ranks: Sequence[int], purpose: str = "agreement", who: str = AGREEMENT) -> None:
        self.ranks, self.purpose, self.who = tuple(ranks), purpose, who
        self.index = self.ranks.index(dist.get_rank())
        self.num_modules = Counter[str]()
        self.num_meetings = 0
        self._frames = _Frames(FRAME, len(self.ranks))
        self._told: list[Any] = []  # sends of ``tell`` that may still be under way, with their memory
        announce(self)

    @property
    def process_groups(self) -> list[Any]:
        """The group that this process may wait on; empty before it is made."""
        return [self.group] if self.is_connected else []

    @property
    def is_connected(self) -> bool:
        """Whether there is a process group."""
        return "group" in self.__dict__

    def connect(self) -> None:
        """Make the process group, with all other ranks."""
        _ = self.group

    @cached_property
    def group(self) -> Any:
        """The process group, which all ranks make together when the first message is exchanged."""
        return own_group(self.purpose, self.ranks, self.who)

    def exchange(self, data: bytes, doing: Doing = None) -> list[bytes]:
        """All-gather ``data``: return the bytes that every rank passes, in the order of ``ranks``.

        One round for up to 252 bytes, else two. Raises a RankError if another rank has failed on its way here, and a
        CommunicationError if one is gone, or after the job's timeout. ``doing``: what this rank is about to do.
        """
        frames = self._gather(self._frames, len(data).to_bytes(HEAD, "big") + data[: FRAME - HEAD], doing)
        sizes = [int.from_bytes(frame[:HEAD], "big") for frame in frames]
        longest = max(sizes)
        if longest == FAILED:
            raise self._failure(sizes.index(FAILED), doing)
        if longest <= FRAME - HEAD:
            return [frame[HEAD : HEAD + size] for frame, size in zip(frames, sizes, strict=True)]
        frames = self._gather(_Frames(longest, len(self.ranks)), data)
        return [frame[:size] for frame, size in zip(frames, sizes, strict=True)]

    def tell(self, error: Exception) -> None:
        """Let the other ranks know that this one has failed: their next exchange raises a RankError.

        Waits for them a few seconds at most, and ignores errors, which mean that they are gone.
        """
        message = error_line(error).encode()
        page = (message if len(message) <= PAGE else message[: PAGE - 3] + b"...").ljust(PAGE, b"\0")
        with contextlib.suppress(RuntimeError):
            for size, sent in ((FRAME, FAILED.to_bytes(HEAD, "big")), (PAGE, page)):
                frames = _Frames(size, len(self.ranks))
                frames.sent[: len(sent)] = sent
                self._told.append((self.group._allgather_base(frames.receiver, frames.sender), frames))
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and not all(work.is_completed() for work, _ in self._told):
                time.sleep(0.001)
        self._told = [(work, frames) for work, frames in self._told if not work.is_completed()]

    def _failure(self, index: int, doing: Doing) -> RankError:
        """Receive the message of a rank that has failed, and return the error for it."""
        page = self._gather(_Frames(PAGE, len(self.ranks)), b"")[index]
        message = page.rstrip(b"\0").decode(errors="replace")
        return failure(self.ranks[index], message, doing() if doing else "")

    def _gather(self, frames: _Frames, data: bytes, doing: Doing = None) -> list[bytes]:
        """All-gather the frames of all ranks. All waits of an agreement are here."""
        frames.sent[: len(data)] = data
        with waiting(lambda: f"{self.who} before this rank {doing()}" if doing else self.who, self.ranks):
            while self._told:
                self._told.pop(0)[0].wait()
            self.group._allgather_base(frames.receiver, frames.sender).wait()
        received, size = bytes(frames.received), len(frames.sent)
        return [received[start : start + size] for start in range(0, len(received), size)]


def failure(rank: int, message: str, doing: str) -> RankError:
    """The error that a rank raises because another one has failed. ``doing``: what this rank is about to do."""
    problem = f"this rank {doing}, and cannot go on alone" if doing else "this rank cannot go on alone"
    return RankError(f"rank {rank} failed", message.replace("\n", "\n  "), problem, f"mend what rank {rank} reports")


class _Frames:
    """Buffers for one message of each rank, viewed as tensors."""

    def __init__(self, size: int, count: int) -> None:
        self.sent, self.received = bytearray(size), bytearray(size * count)
        self.sender = torch.frombuffer(self.sent, dtype=torch.uint8)
        self.receiver = torch.frombuffer(self.received, dtype=torch.uint8)


_agreements: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Agreement]] = WeakKeyDictionary()


def agreement_on(device_mesh: DeviceMesh) -> Agreement | None:
    """The agreement of the ranks of a mesh; None for a single rank, and for a job of fake processes."""
    return agreement_of(device_mesh.mesh.flatten().tolist())


def agreement_of(ranks: Sequence[int]) -> Agreement | None:
    """The agreement of these ranks; None for a single rank, and for a job of fake processes.

    All modules on the same ranks share one, so that calls made in another order on one rank meet here and raise an
    error. It lives as long as the job's default process group.
    """
    job = dist.group.WORLD
    if len(ranks) == 1 or job is None or dist.get_backend() == "fake":
        return None
    known, key = _agreements.setdefault(job, {}), tuple(sorted(ranks))
    if key not in known:
        known[key] = Agreement(key)
    return known[key]
