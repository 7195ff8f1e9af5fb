"""The loopback network of local ranks: its byte counters, and a private one that no other process uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

COUNTERS = Path("/proc/net/dev")
_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def sent_bytes(interface: str | None = None) -> int | None:
    """Bytes that an interface (loopback by default) has sent since boot; None if the system does not count them.

    The difference between two readings with all ranks waiting is what they sent in between, headers included.
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
    """Give processes that are started in the block a loopback interface of their own.

    Yields whether the system allows it (Linux, as root); if not, they share the usual one.
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
