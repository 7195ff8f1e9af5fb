"""How a rank spends the time of a step, from the profiler's events and the processor's clocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import NamedTuple

STEP = "one step of the benchmark"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise", "_scaled_dot_product", "convolution")
OPTIMIZER = "Optimizer.step#"
COMMUNICATION = ("c10d::", "_c10d_functional::", "record_param_comms")
OTHER_THREADS = "gloo:"  # events that begin in this thread and end in gloo's


class Event(NamedTuple):
    """A profiler event of the main thread; times in nanoseconds."""

    name: str
    start: int
    duration: int


class Clock(NamedTuple):
    """Seconds of wall time, of processor time of this process and of this thread, and of queueing for a processor."""

    seconds: float
    busy: float
    own: float
    queued: float

    @classmethod
    def now(cls) -> Clock:
        """Read all clocks; only the difference of two readings has a meaning."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time(), queued())

    def until_now(self) -> Clock:
        """The time since this reading."""
        return Clock(*(after - before for before, after in zip(self, Clock.now(), strict=True)))


def queued() -> float:
    """Seconds that this thread was runnable without a processor; 0 if the system is not Linux."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of one rank's step by kind of work.

    ``products``: matrix products and attention. ``elementwise``: all other kernels of forward and backward.
    ``optimizer``: its whole step. ``dispatch``: the rest of the thread's processor time, which is Python, autograd and
    compiled code. ``waiting``: the time that the thread waits for other ranks. ``network``: processor time of gloo.
    """

    products: float = 0.0
    elementwise: float = 0.0
    optimizer: float = 0.0
    dispatch: float = 0.0
    waiting: float = 0.0
    network: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {1e3 * getattr(self, each.name):.1f}" for each in fields(self))


def spent(events: Iterable[Event], profiled: Clock, timed: Sequence[Clock]) -> Spent:
    """The time by kind, from the events and clock of one profiled step and the clocks of steps without profiler.

    Events measure wall time; the time of queueing for a processor is subtracted from all of them in proportion.
    """
    nanoseconds = {"products": 0, "elementwise": 0, "optimizer": 0}
    for path, duration in own_times(events):
        kind = _kind(path)
        if kind is not None:
            nanoseconds[kind] += duration
    ran = profiled.own / (profiled.own + profiled.queued)
    kinds = {kind: ran * count / 1e9 for kind, count in nanoseconds.items()}
    return Spent(
        **kinds,
        dispatch=max(0.0, median(each.own for each in timed) - sum(kinds.values())),
        waiting=max(0.0, median(each.seconds - each.own - each.queued for each in timed)),
        network=median(each.busy - each.own for each in timed),
    )


def _kind(path: Sequence[str]) -> str | None:
    """The kind of work of the innermost of nested events, by their names; None for dispatch and waiting."""
    if any(name.startswith(OPTIMIZER) for name in path):
        return "optimizer"
    namespace, _, op = path[-1].rpartition("::")
    if not namespace or namespace.startswith("autograd::") or any(name.startswith(COMMUNICATION) for name in path):
        return None
    return "products" if op.startswith(PRODUCTS) else "elementwise"


def own_times(events: Iterable[Event]) -> list[tuple[tuple[str, ...], int]]:
    """For each event, the names of the enclosing events and its own, and its time without the events inside it."""
    found: list[tuple[tuple[str, ...], int]] = []
    around: list[tuple[int, int]] = []  # index in found, end
    for event in sorted(events, key=lambda each: (each.start, -each.duration)):
        while around and around[-1][1] <= event.start:
            around.pop()
        path: tuple[str, ...] = ()
        if around:
            index = around[-1][0]
            path = found[index][0]
            found[index] = path, found[index][1] - event.duration
        found.append(((*path, event.name), event.duration))
        around.append((len(found) - 1, event.start + event.duration))
    return found
