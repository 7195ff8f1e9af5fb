"""How values go from stage to stage: within this process, or from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.language.sharding import TensorType
from shardc.program.stages import Crossing

from ..comm.messages import SMALL
from .host import bytes_of

Message = list[list[Tensor]]  # for each rank of a stage that lives in this process, the values of a crossing
Key = tuple[Crossing, int]  # of a microbatch; of none, ALL, once a step
Types = Sequence[TensorType]


class Channel(Protocol):
    """Carries messages. On each way from rank to rank they are received in the order in which they were sent.

    ``place``: for each stage, which of the pipeline's ranks holds it.
    """

    place: tuple[int, ...]

    def send(self, key: Key, message: Message) -> None:
        """Send, and do not wait."""

    def post(self, key: Key, types: Types) -> None:
        """Be ready to receive values of these types."""

    def is_there(self, key: Key) -> bool:
        """Whether ``take`` is worth a try: False where it would never return."""

    def take(self, key: Key) -> Message:
        """Wait for a message."""

    def close(self) -> None:
        """Wait until all that was sent has gone."""


@dataclass(slots=True)
class Mailbox:
    """Both stages live in this process."""

    messages: dict[Key, Message] = field(default_factory=dict)
    place: tuple[int, ...] = ()

    def send(self, key: Key, message: Message) -> None:
        """Put it there."""
        self.messages[key] = message

    def post(self, key: Key, types: Types) -> None:
        """Nothing to be done."""

    def is_there(self, key: Key) -> bool:
        """Whether it was sent."""
        return key in self.messages

    def take(self, key: Key) -> Message:
        """Take it away."""
        return self.messages.pop(key)

    def close(self) -> None:
        """All has gone."""


class RankChannel:
    """From this rank to those that hold other stages, over process groups of the pipeline's ranks.

    Ranks send up the line in one group and down it in another: so each way from rank to rank, in one direction, has a
    communicator of its own. ``lines``: all lines of the job, of which this rank is in one; ``place``: for each stage
    where in the line it is. ``sent_bytes`` to other ranks so far.
    """

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device, rank = device, dist.get_rank()
        made = [(line, [dist.new_group(list(line)) for _ in ("down", "up")]) for line in lines]  # on every rank, all
        self.line, self.groups = next((line, groups) for line, groups in made if rank in line)
        self.at = self.line.index(rank)
        self.place: tuple[int, ...] = ()
        self.sent_bytes = 0
        self.inside, self.sent, self.posted = Mailbox(), list[tuple[Any, Tensor]](), dict[Key, Any]()

    def send(self, key: Key, message: Message) -> None:
        """To the rank of its stage; within this rank it is handed over."""
        target = self.place[key[0].target]
        if target == self.at:
            return self.inside.send(key, message)
        self.sent = [(work, value) for work, value in self.sent if not work.is_completed()]
        group = self.groups[target > self.at]
        for flat in _together([bytes_of(value.contiguous()) for value in message[0]]):
            self.sent_bytes += flat.nbytes
            self.sent.append((dist.isend(flat, self.line[target], group=group, tag=_tag(key)), flat))
        return None

    def post(self, key: Key, types: Types) -> None:
        """Receive into new tensors; within this rank there is nothing to be done."""
        source = self.place[key[0].source]
        if source == self.at:
            return
        values = [torch.empty(type_.shape, dtype=type_.dtype, device=self.device) for type_ in types]
        group, rank, own = self.groups[self.at > source], self.line[source], list(map(bytes_of, values))
        flats = _together(own)
        works = [dist.irecv(flat, rank, group=group, tag=_tag(key)) for flat in flats]
        self.posted[key] = works, values, own, flats

    def is_there(self, key: Key) -> bool:
        """A message from another rank is waited for."""
        return self.place[key[0].source] != self.at or self.inside.is_there(key)

    def take(self, key: Key) -> Message:
        """Wait for it."""
        if key not in self.posted:
            return self.inside.take(key)
        works, values, own, flats = self.posted.pop(key)
        for work in works:
            work.wait()
        _apart(flats, own)
        return [values]

    def close(self) -> None:
        """Wait for all that was sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def _tag(key: Key) -> int:
    """Which message it is, to gloo: should an order differ, ranks wait in vain and do not mistake one for another."""
    crossing, microbatch = key
    return ((microbatch + 1) * 256 + crossing.source) * 256 + crossing.target


def _together(values: Sequence[Tensor]) -> list[Tensor]:
    """The bytes that go as one: each large value by itself, those that are small joined, of none nothing."""
    small = [value for value in values if 0 < value.nbytes <= SMALL]
    large = [value for value in values if value.nbytes > SMALL]
    return [*large, *(small if len(small) < 2 else [torch.cat(small)])]


def _apart(flats: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give the values what came in buffers like those that ``_together`` makes of them."""
    small = [value for value in values if 0 < value.nbytes <= SMALL]
    if len(small) > 1:
        for value, part in zip(small, flats[-1].split([value.nbytes for value in small]), strict=True):
            value.copy_(part)
