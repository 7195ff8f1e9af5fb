"""Sends parts of one rank's tensors to the ranks that store them: each rank receives each of its parts once.

A part that several ranks store travels along a tree of these ranks, so that none sends it more than twice. Small parts
for the same ranks share a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .checksum import raw_bytes
from .process_group import Group, in_range

BUCKET = 25 * 2**20  # bytes that are packed together, as many as DDP's
TAG = (1 << 20) + 1  # distinguishes these messages from a user's own


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor of the group's first rank.

    ``holders``: the ranks that store it, as indices of the group, ascending. ``nbytes``: its size. ``read``: the part,
    on the first rank. ``into``: this rank's memory for it, contiguous; None if this rank does not store it.
    """

    holders: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensor]
    into: Tensor | None


def scatter(parts: Sequence[Part], group: Group, device: torch.device) -> None:
    """Fill the memory of every part on every rank that stores it; ``parts`` must be the same list on all ranks.

    Messages are on ``device``, whichever memory parts are in. At a time the first rank's messages have at most the
    bytes of all parts; any other rank's have those of one message and of the messages that it passes on.
    """
    works: list[tuple[object, Tensor]] = []
    for message in _messages(parts):
        ranks = [0, *(i for i in message[0].holders if i != 0)]
        if group.index not in ranks:
            continue
        own = ranks.index(group.index)
        children = [ranks[i] for i in (2 * own + 1, 2 * own + 2) if i < len(ranks)]
        if own == 0:
            for part in message if message[0].holders[0] == 0 else ():
                if part.into is not (whole := part.read()):
                    _memory(part).copy_(whole)
            data = _packed(message, device) if children else None
        else:
            data = _received(message, ranks[(own - 1) // 2], group, device)
        if data is not None:
            works += [(_send(data, child, group), data) for child in children]
    for work, _ in works:
        work.wait(group.timeout)  # type: ignore[attr-defined]


def broadcast(tensors: Sequence[Tensor], group: Group, device: torch.device) -> None:
    """Write the first rank's values to contiguous tensors of all ranks of a group, in place."""
    everyone = tuple(range(group.size))
    for batch in batches([each.nbytes for each in tensors]):
        own = [tensors[i] for i in batch]
        scatter([Part(everyone, each.nbytes, partial(_same, each), each) for each in own], group, device)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def batches(sizes: Sequence[int], most: int = BUCKET) -> Iterator[range]:
    """Runs of indices of items of these sizes; each run has at most ``most`` bytes, unless it is one larger item."""
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and total + sizes[stop] <= most:
            total, stop = total + sizes[stop], stop + 1
        yield range(start, stop)
        start = stop


def _messages(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that share a message: of the same ranks, up to ``BUCKET`` bytes; in the same order on all ranks."""
    by_holders: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        if part.nbytes and part.holders:
            by_holders.setdefault(part.holders, []).append(part)
    groups = [(each, batch) for each in by_holders.values() for batch in batches([part.nbytes for part in each])]
    return [[each[i] for i in batch] for each, batch in groups]


def _packed(message: Sequence[Part], device: torch.device) -> Tensor:
    """The bytes of a message; a view of its memory for a single contiguous part."""
    own = [raw_bytes(part.read()) for part in message]
    return (own[0] if len(own) == 1 else torch.cat(own)).to(device)


def _received(message: Sequence[Part], source: int, group: Group, device: torch.device) -> Tensor:
    """Receive a message and fill its parts; receive a single part directly in its memory if that is on the device."""
    own = [raw_bytes(_memory(part)) for part in message]
    is_direct = len(own) == 1 and own[0].device == device
    data = own[0] if is_direct else torch.empty(sum(part.nbytes for part in message), dtype=torch.uint8, device=device)
    with in_range("shardc::scatter"):
        group.process.recv([data], group.order[source], TAG).wait(group.timeout)
    if not is_direct:
        for each, piece in zip(own, data.split([part.nbytes for part in message]), strict=True):
            each.copy_(piece)
    return data


def _send(data: Tensor, target: int, group: Group) -> object:
    with in_range("shardc::scatter"):
        return group.process.send([data], group.order[target], TAG)


def _memory(part: Part) -> Tensor:
    assert part.into is not None and part.into.is_contiguous(), part.holders
    return part.into
