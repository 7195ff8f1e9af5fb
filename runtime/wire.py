"""Bytes on the wire: what a network interface of this machine has sent, as the kernel counts."""

from __future__ import annotations

from pathlib import Path

from .launch import loopback

COUNTERS = Path("/proc/net/dev")


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
