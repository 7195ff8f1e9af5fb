"""Messages from stage to stage: within this process, or from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.language.sharding import TensorType
from shardc.program.stages import Crossing
from shardc.schedules.schedule import ALL

from ..comm.checksum import raw_bytes
from ..comm.failure import announce, job_timeout, waiting
from ..comm.messages import SMALL
from ..comm.process_group import new_process_group

Message = list[list[Tensor]]  # for each of a stage's ranks in this process, the values of a crossing
MessageId = tuple[Crossing, int]  # with its microbatch, or ALL for a message that is sent once a step
Types = Sequence[TensorType]


@dataclass(slots=True)
class LocalChannel:
    """Messages between stages in one process. ``place``: for each stage its rank in the pipeline."""

    messages: dict[MessageId, Message] = field(default_factory=dict)
    place: tuple[int, ...] = ()

    def send(self, key: MessageId, message: Message) -> None:
        self.messages[key] = message

    def post(self, key: MessageId, types: Types) -> None:
        """Post a receive of values of these types: nothing to do."""

    def is_there(self, key: MessageId) -> bool:
        """Whether a message was sent."""
        return key in self.messages

    def take(self, key: MessageId) -> Message:
        """Take a message."""
        return self.messages.pop(key)

    def close(self) -> None:
        """Wait until every message has been sent: nothing to do."""


class RankChannel:
    """Messages of this rank to and from other stages' ranks, over process groups of the pipeline's ranks.

    Between two ranks, messages are received in the order in which they were sent. Messages to later and to earlier
    ranks have two process groups, so that each direction has a communicator of its own. ``lines``: the ranks of every
    pipeline of the job, in order; this rank is in one of them, at index ``at``. ``place``: for each stage the index of
    its rank. ``sent_bytes``: bytes sent to other ranks so far.
    """

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device, axis: str) -> None:
        self.device, self.axis, self.timeout, rank = device, axis, job_timeout(), dist.get_rank()
        self.line = next(line for line in lines if rank in line)
        # Only its own ranks make the groups: a pipeline may have a part of the job.
        self.process_groups = [new_process_group(self.line) for _ in ("earlier", "later")]
        announce(self)
        self.at = self.line.index(rank)
        self.place: tuple[int, ...] = ()
        self.sent_bytes = 0
        self.local, self.posted = LocalChannel(), dict[MessageId, Any]()
        self.sent = list[tuple[Any, Tensor, MessageId]]()

    def send(self, key: MessageId, message: Message) -> None:
        """Send to the rank of the target stage; within this rank hand the message over."""
        target = self.place[key[0].target]
        if target == self.at:
            self.local.send(key, message)
            return
        self.sent = [each for each in self.sent if not each[0].is_completed()]
        group = self.process_groups[target > self.at]
        try:
            for flat in _packed([raw_bytes(value) for value in message[0]]):
                self.sent_bytes += flat.nbytes
                self.sent.append((dist.isend(flat, self.line[target], group=group, tag=_tag(key)), flat, key))
        except RuntimeError as error:
            self._raise_explained(error, key)

    def post(self, key: MessageId, types: Types) -> None:
        """Post a receive into new tensors; within this rank there is nothing to do."""
        source = self.place[key[0].source]
        if source == self.at:
            return
        values = [torch.empty(type_.shape, dtype=type_.dtype, device=self.device) for type_ in types]
        group, rank, own = self.process_groups[self.at > source], self.line[source], list(map(raw_bytes, values))
        flats = _packed(own)
        try:
            works = [dist.irecv(flat, rank, group=group, tag=_tag(key)) for flat in flats]
        except RuntimeError as error:
            self._raise_explained(error, key)
        self.posted[key] = works, values, own, flats

    def is_there(self, key: MessageId) -> bool:
        """Whether a message was sent; always true for one of another rank, which ``take`` waits for."""
        return self.place[key[0].source] != self.at or self.local.is_there(key)

    def take(self, key: MessageId) -> Message:
        if key not in self.posted:
            return self.local.take(key)
        works, values, own, flats = self.posted.pop(key)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._raise_explained(error, key)
        small = _small(own)  # large values were received in place
        if len(small) > 1:
            torch.split_with_sizes_copy(flats[-1], [value.nbytes for value in small], out=small)
        return [values]

    def close(self) -> None:
        """Wait until every message has been sent."""
        for work, _, key in self.sent:
            try:
                work.wait()
            except RuntimeError as error:
                self._raise_explained(error, key)
        self.sent.clear()

    def _raise_explained(self, error: RuntimeError, key: MessageId) -> NoReturn:
        """Raise an error that names the message and the rank that is gone."""
        crossing, microbatch = key
        ranks = [self.line[self.place[stage]] for stage in (crossing.source, crossing.target)]
        when = "after the last microbatch" if microbatch == ALL else f"{crossing.part}, microbatch {microbatch}"
        text = f"the message from stage {crossing.source} to stage {crossing.target} ({when}) over {self.axis}"
        with waiting(lambda: text, ranks):
            raise error


Channel = LocalChannel | RankChannel


def _tag(key: MessageId) -> int:
    """gloo's tag of a message: if orders ever differed, ranks would wait in vain, but take no message for another."""
    crossing, microbatch = key
    return ((microbatch + 1) * 256 + crossing.source) * 256 + crossing.target


def _packed(values: Sequence[Tensor]) -> list[Tensor]:
    """The buffers to send for these values: each large value by itself, small ones joined, empty ones left out."""
    small, large = _small(values), [value for value in values if value.nbytes > SMALL]
    return [*large, *(small if len(small) < 2 else [torch.cat(small)])]


def _small(values: Sequence[Tensor]) -> list[Tensor]:
    return [value for value in values if 0 < value.nbytes <= SMALL]
