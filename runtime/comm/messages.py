"""All-gathers and reduce-scatters on gloo as point-to-point messages, without packing large values into buffers.

gloo's own collectives read one buffer and fill another, both new each time. Here each large value is sent from its own
memory directly to its destination; small values are packed together. This sends as many bytes as a ring. Groups have at
least two ranks.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.ops.reduction import NARROW

from .comm import REDUCE
from .process_group import REDUCE_STACKED, Group, in_range, join, split

SMALL = 2**17  # bytes; packing that many costs as much as a message, as measured on 2 and 4 ranks
TAG = 1 << 20  # distinguishes these messages from a user's own

Gather = tuple[Tensor, int, Tensor | None]  # this rank's piece, the dim to join along, and a tensor for the result
Reduction = tuple[Tensor, int]  # the operand, and the dim along which this rank keeps its piece
Works = list[Any]


def all_gather(gathers: Sequence[Gather], group: Group) -> Callable[[], list[Tensor]]:
    """Start all-gathers. The returned function waits, and returns for each the joined pieces of all ranks."""
    small = _small([x.nbytes for x, *_ in gathers])
    alone = [i for i in range(len(gathers)) if i not in small]
    rows = [_rows(*gathers[i], group) for i in alone]
    if small:
        packed = torch.cat([gathers[i][0].reshape(-1) for i in small])
        rows.append(_rows(packed, 0, None, group))
    own = [row[group.index] for row in rows]
    with in_range("c10d::all_gather"):
        works = _exchange([own] * group.size, [row.unbind() for row in rows], group)

    def finish() -> list[Tensor]:
        _wait(works, group.timeout)
        results = {i: _joined(row, *gathers[i]) for i, row in zip(alone, rows, strict=False)}
        if small:  # each is copied once, or twice if its dim is not the first
            sizes = [gathers[i][0].numel() for i in small]
            flats = [_memory(*gathers[i], group.size).view(group.size, -1) for i in small]
            torch.split_with_sizes_copy(rows[-1].view(group.size, -1), sizes, 1, out=flats)
            results |= {i: _joined(flat, *gathers[i]) for i, flat in zip(small, flats, strict=True)}
        return [results[i] for i in range(len(gathers))]

    return finish


def reduce_scatter(reductions: Sequence[Reduction], op: str, group: Group) -> Callable[[], list[Tensor]]:
    """Start reduce-scatters. The returned function waits, and returns this rank's piece of each reduction.

    Terms are added in the order of the group.
    """
    size, indices = group.size, range(group.size)
    shapes = [tuple(n // size if i == dim else n for i, n in enumerate(x.shape)) for x, dim in reductions]
    small = _small([x.nbytes // size for x, _ in reductions])
    alone = [i for i in range(len(reductions)) if i not in small]
    sent = [split(x, size, dim) for x, dim in (reductions[i] for i in alone)]
    if small:
        pieces = [x if dim == 0 else split(x, size, dim) for x, dim in (reductions[i] for i in small)]
        sent.append(torch.cat([piece.reshape(size, piece.numel() // size) for piece in pieces], 1))
    received = [[torch.empty_like(each[0]) if i != group.index else each[i] for i in indices] for each in sent]
    with in_range("c10d::reduce_scatter"):
        works = _exchange([[each[i] for each in sent] for i in indices], received, group)

    def finish() -> list[Tensor]:
        _wait(works, group.timeout)
        reduced = [_reduced(each, op, group.index) for each in received]
        results = dict(zip(alone, reduced, strict=False))
        if small:
            results |= zip(small, reduced[-1].split([math.prod(shapes[i]) for i in small]), strict=True)
        return [results[i].view(shape) for i, shape in enumerate(shapes)]

    return finish


def rotate(xs: Sequence[Tensor], group: Group, by: int) -> Callable[[], list[Tensor]]:
    """Start to send tensors ``by`` indices further. The returned function waits, and returns the received tensors."""
    backend: Any = group.process._get_backend(torch.device("cpu"))
    before, after = (group.order[(group.index + shift) % group.size] for shift in (-by, by))
    sent = [x.contiguous() for x in xs]
    received = [torch.empty_like(x) for x in sent]
    with in_range("c10d::rotate"):
        works = [backend.recv([x], before, TAG) for x in received if x.numel()]
        works += [backend.send([x], after, TAG) for x in sent if x.numel()]

    def finish() -> list[Tensor]:
        _wait(works, group.timeout)
        sent.clear()
        return received

    return finish


def _small(sizes: Sequence[int]) -> list[int]:
    """The indices of values that are packed together, by their sizes in bytes; empty if there is only one."""
    small = [i for i, size in enumerate(sizes) if size <= SMALL]
    return small if len(small) > 1 else []


def _exchange(sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: Group) -> Works:
    """Start to send all of ``sent[i]`` to index i of the group, and to receive ``each[i]`` of each in ``received``."""
    backend: Any = group.process._get_backend(torch.device("cpu"))
    works: Works = []
    for shift in range(1, group.size):  # so that ranks do not all send to one rank at a time
        source, target = (group.index - shift) % group.size, (group.index + shift) % group.size
        works += [backend.recv([each[source]], group.order[source], TAG) for each in received if each[source].numel()]
        works += [backend.send([each], group.order[target], TAG) for each in sent[target] if each.numel()]
    return works


def _wait(works: Works, timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
    works.clear()


def _rows(x: Tensor, dim: int, into: Tensor | None, group: Group) -> Tensor:
    """Memory for the pieces of all ranks, with this rank's filled in."""
    rows = _memory(x, dim, into, group.size)
    if rows[group.index].data_ptr() != x.data_ptr() or not x.is_contiguous():
        rows[group.index].copy_(x)
    return rows


def _memory(x: Tensor, dim: int, into: Tensor | None, count: int) -> Tensor:
    """Memory for the pieces of ``count`` ranks, stacked: ``into`` itself if they are contiguous there."""
    shape = (count, *x.shape)
    fits = into is not None and dim == 0 and into.is_contiguous() and into.numel() == count * x.numel()
    return into.view(shape) if into is not None and fits else x.new_empty(shape)


def _joined(rows: Tensor, x: Tensor, dim: int, into: Tensor | None) -> Tensor:
    if into is not None and into.data_ptr() == rows.data_ptr():
        return into
    count = rows.shape[0]
    joined = rows.view(count * x.shape[0], *x.shape[1:]) if dim == 0 else join(rows.view(count, *x.shape), dim)
    return joined if into is None else into.copy_(joined)


def _reduced(pieces: Sequence[Tensor], op: str, own: int) -> Tensor:
    """The reduction of all ranks' pieces, computed in received memory."""
    if pieces[0].dtype in NARROW:
        return REDUCE_STACKED[op](torch.stack(list(pieces)))
    memory = pieces[0 if own else 1]
    return functools.reduce(lambda a, b: REDUCE[op](a, b, out=memory), pieces)  # type: ignore[call-arg]


COUNTERS = Path("/proc/net/dev")
_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def sent_bytes(interface: str | None = None) -> int | None:
    """Bytes that an interface (loopback by default) has sent since boot; None if the system does not count them.

    The difference between two readings, taken while all ranks wait, is the bytes sent in between, headers included.
    """
    if not COUNTERS.exists():
        return None
    return parse_counters(COUNTERS.read_text())[interface or loopback()]


def parse_counters(text: str) -> dict[str, int]:
    """Bytes sent by each interface, from the text of /proc/net/dev: the ninth number after the name."""
    rows = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def loopback() -> str:
    """The name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0", *names) if name in names)


@contextlib.contextmanager
def private_loopback() -> Iterator[bool]:
    """Context that gives processes started in it a loopback interface of their own.

    Yields whether the system allows it (Linux, as root); if not, they share the usual interface.
    """
    try:
        import fcntl

        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        is_private = _system("unshare", _NETWORK) == 0
        if is_private:  # the loopback interface is down in a new network
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", loopback().encode(), _UP_AND_RUNNING))
        yield is_private
    finally:
        _system("setns", before, _NETWORK)
        os.close(before)


def _system(name: str, *args: int) -> int:
    return int(getattr(ctypes.CDLL(None), name)(*args))
