"""Gathers and reductions of a gloo group as messages from rank to rank, out of and into the memory where values lie.

A collective of gloo's own takes one buffer and makes another: values are packed before and unpacked after, in memory
that is new each time. Here each value goes by itself, straight from the sender's memory into the receiver's; those
that are small go together. As many bytes are sent as by a ring. A group of one never comes here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..execute.ranges import in_range
from .comm import REDUCE
from .functional import LOCAL, Group, join, split

SMALL = 2**17  # bytes: a message costs as much as packing so many, by measurement on 2 and 4 ranks
TAG = 1 << 20  # of these messages, so that none of the user's own is taken for one
NARROW = (torch.float16, torch.bfloat16)  # sums of several are rounded once

Gather = tuple[Tensor, int, Tensor | None]  # our piece, the dim to join along, and the memory to join in, if any
Reduction = tuple[Tensor, int]  # the operand, and the dim along which we keep our piece
Works = list[Any]


def all_gather(given: Sequence[Gather], group: Group) -> Callable[[], list[Tensor]]:
    """For each of the pieces those of all ranks, joined."""
    small = _small([x.nbytes for x, *_ in given])
    alone = [i for i in range(len(given)) if i not in small]
    rows = [_rows(*given[i], group) for i in alone]
    if small:
        packed = torch.cat([given[i][0].reshape(-1) for i in small])
        rows.append(_rows(packed, 0, None, group))
    own = [row[group.index] for row in rows]
    with in_range("c10d::all_gather"):
        works = _exchange([own] * group.size, [row.unbind() for row in rows], group)

    def finish() -> list[Tensor]:
        _wait(works)
        found = {i: _joined(row, *given[i]) for i, row in zip(alone, rows, strict=False)}
        if small:
            found |= zip(small, _unpacked(rows[-1].view(group.size, -1), [given[i] for i in small]), strict=True)
        return [found[i] for i in range(len(given))]

    return finish


def reduce_scatter(given: Sequence[Reduction], op: str, group: Group) -> Callable[[], list[Tensor]]:
    """For each of the operands our piece of the reduction over all ranks, which is made in the order of the group."""
    shapes = [tuple(size // group.size if i == dim else size for i, size in enumerate(x.shape)) for x, dim in given]
    small = _small([x.nbytes // group.size for x, _ in given])
    alone = [i for i in range(len(given)) if i not in small]
    sent = [split(x, group.size, dim) for x, dim in (given[i] for i in alone)]
    if small:
        sent.append(torch.cat([_pieces(*given[i], group.size) for i in small], 1))
    taken = [[torch.empty_like(each[0]) if i != group.index else each[i] for i in range(group.size)] for each in sent]
    with in_range("c10d::reduce_scatter"):
        works = _exchange([[each[i] for each in sent] for i in range(group.size)], taken, group)

    def finish() -> list[Tensor]:
        _wait(works)
        made = [_reduced(each, op, group.index) for each in taken]
        found = dict(zip(alone, made, strict=False))
        if small:
            found |= zip(small, made[-1].split([math.prod(shapes[i]) for i in small]), strict=True)
        return [found[i].view(shape) for i, shape in enumerate(shapes)]

    return finish


def _small(sizes: Sequence[int]) -> list[int]:
    """Those of values with so many bytes in a message that go together; one has nothing to go with."""
    found = [i for i, size in enumerate(sizes) if size <= SMALL]
    return found if len(found) > 1 else []


def _exchange(given: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]], group: Group) -> Works:
    """Start to send ``given[i]`` to the rank at index i of the group, and to take from it each of ``taken`` at i."""
    backend: Any = group.process._get_backend(torch.device("cpu"))
    works: Works = []
    for shift in range(1, group.size):  # so that not all send to one at a time
        source, target = (group.index - shift) % group.size, (group.index + shift) % group.size
        works += [backend.recv([each[source]], group.order[source], TAG) for each in taken if each[source].numel()]
        works += [backend.send([each], group.order[target], TAG) for each in given[target] if each.numel()]
    return works


def _wait(works: Works) -> None:
    for work in works:
        work.wait()
    works.clear()


def _rows(x: Tensor, dim: int, into: Tensor | None, group: Group) -> Tensor:
    """Memory for the pieces of all ranks, stacked, with ours in its place: ``into`` itself where it can be."""
    shape = (group.size, *x.shape)
    rows = into.view(shape) if into is not None and _fits(into, x, dim, group.size) else x.new_empty(shape)
    if rows[group.index].data_ptr() != x.data_ptr() or not x.is_contiguous():
        rows[group.index].copy_(x)
    return rows


def _pieces(x: Tensor, dim: int, count: int) -> Tensor:
    """A row for each of equal pieces along ``dim``."""
    return (x if dim == 0 else split(x, count, dim)).reshape(count, x.numel() // count)


def _unpacked(rows: Tensor, given: Sequence[Gather]) -> list[Tensor]:
    """Values from what all ranks have sent of them together, a row each: one copy of each, two where a dim is inner."""
    count = len(rows)
    flats = [
        into.view(count, x.numel())
        if into is not None and _fits(into, x, dim, count)
        else x.new_empty(count, x.numel())
        for x, dim, into in given
    ]
    torch.split_with_sizes_copy(rows, [x.numel() for x, *_ in given], 1, out=flats)
    return [_joined(flat, *each) for flat, each in zip(flats, given, strict=True)]


def _fits(into: Tensor, x: Tensor, dim: int, count: int) -> bool:
    """Whether the pieces of so many ranks lie in it one after the other."""
    return dim == 0 and into.is_contiguous() and into.numel() == count * x.numel()


def _joined(rows: Tensor, x: Tensor, dim: int, into: Tensor | None) -> Tensor:
    if into is not None and into.data_ptr() == rows.data_ptr():
        return into
    count = rows.shape[0]
    joined = rows.view(count * x.shape[0], *x.shape[1:]) if dim == 0 else join(rows.view(count, *x.shape), dim)
    return joined if into is None else into.copy_(joined)


def _reduced(pieces: Sequence[Tensor], op: str, own: int) -> Tensor:
    """The reduction of all ranks' pieces, in memory of its own."""
    if pieces[0].dtype in NARROW:
        return LOCAL[op](torch.stack(list(pieces)))
    memory = pieces[0 if own else 1]
    return functools.reduce(lambda a, b: REDUCE[op](a, b, out=memory), pieces)  # type: ignore[call-arg]


COUNTERS = Path("/proc/net/dev")
_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def sent_bytes(interface: str | None = None) -> int | None:
    """Bytes that an interface (loopback by default) has sent since boot; None where the system does not say.

    The difference between two readings, each with all ranks waiting, is what they sent between, headers included.
    """
    if not COUNTERS.exists():
        return None
    return parse_counters(COUNTERS.read_text())[interface or loopback()]


def parse_counters(text: str) -> dict[str, int]:
    """Bytes sent, by interface, from the text of /proc/net/dev: after the name, the ninth number."""
    rows = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def loopback() -> str:
    """The name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0", *names) if name in names)


@contextlib.contextmanager
def private_loopback() -> Iterator[bool]:
    """Processes started in the block have a network of their own: a loopback interface that no other process uses.

    Gives whether the system allows it (Linux, to root); where it does not, the block runs as it is.
    """
    try:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        is_private = _system("unshare", _NETWORK) == 0
        if is_private:
            _switch_on()
        yield is_private
    finally:
        _system("setns", before, _NETWORK)
        os.close(before)


def _system(name: str, *args: int) -> int:
    return int(getattr(ctypes.CDLL(None), name)(*args))


def _switch_on() -> None:
    """A new network begins with its loopback interface down."""
    import fcntl

    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", loopback().encode(), _UP_AND_RUNNING)
        fcntl.ioctl(any_socket, _SET_FLAGS, request)
