"""The loopback interface: its name, the bytes that it sends as the kernel counts them, and a private one."""

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
