"""One rank's measurements of a row: all ways to train live in the same processes and take their steps in turn.

A change of the machine's speed then affects all of them, and a ratio compares steps taken at nearly the same time.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from breakdown import OTHER_THREADS, STEP, Clock, Event, Spent, spent
from rounds import Steps, take_rounds
from row import Row
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from trainer import Trainer

from shardc.runtime.comm.messages import sent_bytes

COUNTED = 3  # rounds in which bytes are counted; the least count is used, since the kernel may resend a message


@dataclass(slots=True)
class Report:
    """The measurements of one way to train on one rank.

    ``parameters``: their number in the model. ``first_seconds``: to build the model and take one step. ``steps``: time
    of each step, by round. ``wire``: bytes that all ranks sent in a step, by reading. ``persistent``: bytes of live
    tensors between backward and ``zero_grad``; ``peak``: the most bytes within a step. ``collectives``: calls in a
    step. ``spent``: the time of a step by kind of work.
    """

    parameters: int = 0
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    steps: dict[int, Clock] = field(default_factory=dict)
    wire: list[int] = field(default_factory=list)
    announced: int | None = None
    persistent: int = 0
    peak: int = 0
    collectives: int = 0
    spent: Spent = field(default_factory=Spent)


class Runner:
    """One way to train on this rank, and its measurements."""

    def __init__(self, row: Row, name: str) -> None:
        forget_objects()
        self._batches = row.batches()
        self.name, self.report = name, Report()
        dist.barrier()
        start = time.perf_counter()
        self.trainer = row.trainer(name)
        groups = self.trainer.optimizer.param_groups
        self.report.parameters = sum(each.numel() for group in groups for each in group["params"])
        self.takes_part = not self.trainer.alone or dist.get_rank() == 0
        self._between = 0  # bytes of tensors that live between steps
        self._weighed_step(start)
        self.report.announced = self.trainer.announced
        self._events, self._profiled = self._profiled_step()

    @property
    def steps(self) -> dict[int, Clock]:
        """The time of each step, by round."""
        return self.report.steps

    def step(self) -> Clock:
        """Take one step on the next batch; returns its time."""
        start = Clock.now()
        if self.takes_part:
            with threads(self.trainer), record_function(STEP):
                batch = self._batches[len(self.report.losses) % len(self._batches)]
                self.report.losses.append(self.trainer.step(batch))
        return start.until_now()

    def timed_step(self, number: int) -> None:
        """Time the step of a round, which all ranks begin together; the first rounds also count bytes."""
        if number < COUNTED:
            self.report.steps[number] = self.counted_step()
            return
        dist.barrier()
        self.report.steps[number] = self.step()

    def counted_step(self) -> Clock:
        """Take one step between two readings of the bytes that all ranks have sent."""
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        clock = self.step()
        dist.barrier()
        after = sent_bytes()
        dist.barrier()
        if before is not None and after is not None:
            self.report.wire.append(after - before)
        return clock

    def finished(self) -> Report:
        """The report, with the time of a step by kind of work."""
        self.report.spent = spent(self._events, self._profiled, list(self.steps.values()))
        return self.report

    def _profiled_step(self) -> tuple[list[Event], Clock]:
        """Profile the second step: count collectives and find the peak memory; returns its events and its time."""
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            clock = self.counted_step()
        events = profiled.profiler.kineto_results.events()
        calls = (event.name() for event in events if event.name().startswith("c10d::"))
        self.report.collectives = sum(name != "c10d::barrier" for name in calls)
        live = self._between
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        for _, change in sorted(changes):
            live += change
            self.report.peak = max(self.report.peak, live)
        return _of_step(events), clock

    def _weighed_step(self, start: float) -> None:
        """Take the first step, and count live bytes before and after ``zero_grad``. ``start``: when building began."""
        if self.takes_part:
            with threads(self.trainer):
                self.report.losses.append(self.trainer.update(self._batches[0]))
            self.report.first_seconds = time.perf_counter() - start
            self.report.persistent = live_bytes()
            self.trainer.optimizer.zero_grad()
            self._between = live_bytes()
            if self.trainer.settle is not None:  # the buckets keep their size, but Python no longer sees them
                self.trainer.settle()


def measure(row: Row, steps: Steps) -> dict[str, Report]:
    """Measure all ways to train in a row on this rank; returns their reports by name."""
    begun = time.perf_counter()
    runners = [Runner(row, name) for name in row.names]
    forget_objects()  # garbage collection skips the objects of the other runners
    take_rounds(runners, steps, begun)
    gc.unfreeze()
    return {runner.name: runner.finished() for runner in runners}


def _of_step(events: Iterable[Any]) -> list[Event]:
    """The events of the thread that took the step; empty on a rank that took no part."""
    step = next((event for event in events if event.name() == STEP), None)
    if step is None:
        return []
    return [
        Event(event.name(), event.start_ns(), event.duration_ns())
        for event in events
        if event.start_thread_id() == step.start_thread_id()
        and step.start_ns() <= event.start_ns() <= step.end_ns()
        and not event.is_async()
        and event.name() != "[memory]"
        and not event.name().startswith(OTHER_THREADS)
    ]


@contextmanager
def threads(trainer: Trainer) -> Iterator[None]:
    """Let torch use one thread for a rank, and all processors for one device."""
    torch.set_num_threads(os.cpu_count() or 1 if trainer.alone else 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def forget_objects() -> None:
    """Exclude all present objects from garbage collection and from ``live_bytes``, until ``gc.unfreeze``."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of live tensors that were created since ``forget_objects``."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.device.type != "meta")
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
