"""One rank's part of a row: all its ways to train stay alive in the same processes, and take their steps in turn.

So a change of the machine's speed meets them all, and a ratio of two is of steps taken at nearly the same time.
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

COUNTED = 3  # rounds in which bytes are: a message that the kernel sends once more is in one of them, not in all


@dataclass(slots=True)
class Report:
    """What one rank saw of one way to train.

    ``parameters``: how many the model has. ``first_seconds``: to make it and take one step. ``steps``: how long each
    took, by round. ``wire``: bytes that all ranks sent a step, by reading.
    ``persistent``: bytes of live tensors between backward and ``zero_grad``; ``peak``: the most within a step.
    ``collectives``: calls a step. ``spent``: where the time went.
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
    """One way to train on this rank, and what is seen of it."""

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
        self._between = 0  # bytes that live between steps
        self._weighed_step(start)
        self.report.announced = self.trainer.announced
        self._events, self._profiled = self._profiled_step()

    @property
    def steps(self) -> dict[int, Clock]:
        """What each took, by round."""
        return self.report.steps

    def step(self) -> Clock:
        """One step, with the next batch; how long it took."""
        start = Clock.now()
        if self.takes_part:
            with threads(self.trainer), record_function(STEP):
                batch = self._batches[len(self.report.losses) % len(self._batches)]
                self.report.losses.append(self.trainer.step(batch))
        return start.until_now()

    def timed_step(self, number: int) -> None:
        """A round's step, which all ranks begin together; what is sent in the first ones is counted."""
        if number < COUNTED:
            self.report.steps[number] = self.counted_step()
            return
        dist.barrier()
        self.report.steps[number] = self.step()

    def counted_step(self) -> Clock:
        """One step between two readings of what all ranks have sent."""
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
        """With where the time went."""
        self.report.spent = spent(self._events, self._profiled, list(self.steps.values()))
        return self.report

    def _profiled_step(self) -> tuple[list[Event], Clock]:
        """The second step, for the number of collectives and the peak of memory; what was done in it."""
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
        """The first step, and what lives before its gradients are dropped, and after; ``start``: when all began."""
        if self.takes_part:
            with threads(self.trainer):
                self.report.losses.append(self.trainer.update(self._batches[0]))
            self.report.first_seconds = time.perf_counter() - start
            self.report.persistent = live_bytes()
            self.trainer.optimizer.zero_grad()
            self._between = live_bytes()
            if self.trainer.settle is not None:  # as large as before, but no longer seen from Python
                self.trainer.settle()


def measure(row: Row, steps: Steps) -> dict[str, Report]:
    """What this rank sees of everyone in a row."""
    begun = time.perf_counter()
    runners = [Runner(row, name) for name in row.names]
    forget_objects()  # collections do not walk what the others hold
    take_rounds(runners, steps, begun)
    gc.unfreeze()
    return {runner.name: runner.finished() for runner in runners}


def _of_step(events: Iterable[Any]) -> list[Event]:
    """What the thread that took the step did in it; nothing on a rank that took no part."""
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
    """One device has all processors, a rank has one."""
    torch.set_num_threads(os.cpu_count() or 1 if trainer.alone else 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def forget_objects() -> None:
    """What there is now is neither collected nor weighed, until ``gc.unfreeze``."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """The memory of tensors that live, of those made since objects were forgotten."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.device.type != "meta")
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
