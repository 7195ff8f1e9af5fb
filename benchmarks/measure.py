"""One rank's part of a row: all its ways to train stay alive in the same processes, and take their steps in turn.

So a change of the machine's speed meets them all, and a ratio of two is of steps taken at nearly the same time.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from row import Row
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from trainer import Trainer
from workload import SIZES, batches

from shardc.runtime.wire import sent_bytes


@dataclass(frozen=True, slots=True)
class Steps:
    """How many steps everyone takes: ``warm`` ones, then ``timed`` ones.

    Those end after ``seconds`` for the row, but not before 5 were made. Four more are for what is not timed.
    """

    warm: int = 2
    timed: int = 15
    seconds: float = math.inf


@dataclass(slots=True)
class Report:
    """What one rank saw of one way to train.

    ``first_seconds``: to make it and take one step. ``seconds``, ``busy``: of each step, by the clock and by what this
    process computed (all its threads). ``wire``: bytes that all ranks sent a step, by reading.
    ``persistent``: bytes of live tensors between backward and ``zero_grad``; ``peak``: the most within a step.
    ``collectives``: calls a step.
    """

    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    announced: int | None = None
    persistent: int = 0
    peak: int = 0
    collectives: int = 0


class Runner:
    """One way to train on this rank, and what is seen of it."""

    def __init__(self, row: Row, name: str) -> None:
        before = live_storages()
        self._batches = batches(SIZES[row.size], row.job.device)
        self.name, self.report = name, Report()
        dist.barrier()
        start = time.perf_counter()
        self.trainer = row.trainer(name)
        self.takes_part = not self.trainer.alone or dist.get_rank() == 0
        self.step()
        self.report.first_seconds = time.perf_counter() - start
        self.report.announced = self.trainer.announced
        self._between = 0  # bytes that live between steps
        if self.takes_part:
            self._weigh(before)

    def step(self) -> None:
        """One step, with the next batch."""
        if self.takes_part:
            with threads(self.trainer):
                batch = self._batches[len(self.report.losses) % len(self._batches)]
                self.report.losses.append(self.trainer.step(batch))

    def timed_step(self) -> None:
        """One step that all ranks begin together."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        self.step()
        self.report.seconds.append(time.perf_counter() - start)
        self.report.busy.append(time.process_time() - busy)

    def counted_step(self) -> None:
        """One step between two readings of what all ranks have sent."""
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        self.step()
        dist.barrier()
        after = sent_bytes()
        dist.barrier()
        if before is not None and after is not None:
            self.report.wire.append(after - before)

    def profiled_step(self) -> None:
        """One step for the number of collectives and the peak of memory."""
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            self.counted_step()
        events = profiled.profiler.kineto_results.events()
        calls = (event.name() for event in events if event.name().startswith("c10d::"))
        self.report.collectives = sum(name != "c10d::barrier" for name in calls)
        live = self._between
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        for _, change in sorted(changes):
            live += change
            self.report.peak = max(self.report.peak, live)

    def _weigh(self, before: dict[int, int]) -> None:
        """Live bytes of ours: before gradients are dropped, and after."""
        with threads(self.trainer):
            self.report.losses.append(self.trainer.update(self._batches[1]))
        self.report.persistent = self._live(before)
        self.trainer.optimizer.zero_grad()
        self._between = self._live(before)

    def _live(self, before: dict[int, int]) -> int:
        return sum(size for start, size in live_storages().items() if before.get(start) != size)


def measure(row: Row, steps: Steps) -> dict[str, Report]:
    """What this rank sees of everyone in a row."""
    runners = [Runner(row, name) for name in row.names]
    for runner in runners * steps.warm:
        runner.timed_step()
        runner.report.seconds.clear()
        runner.report.busy.clear()
    gc.collect()
    gc.freeze()  # collections do not walk what the others hold
    start = time.perf_counter()
    for i in range(steps.timed):
        for runner in runners[i % len(runners) :] + runners[: i % len(runners)]:  # everyone follows everyone
            runner.timed_step()
        if i >= 4 and _all_ranks(time.perf_counter() - start > steps.seconds):
            break
    for runner in runners:
        runner.counted_step()
        runner.profiled_step()
    gc.unfreeze()
    return {runner.name: runner.report for runner in runners}


def _all_ranks(is_late: bool) -> bool:
    """Whether rank 0 says so."""
    said = torch.tensor([is_late])
    dist.broadcast(said, 0)
    return bool(said)


@contextmanager
def threads(trainer: Trainer) -> Iterator[None]:
    """One device has all processors, a rank has one."""
    torch.set_num_threads(os.cpu_count() or 1 if trainer.alone else 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def live_storages() -> dict[int, int]:
    """The memory of all tensors alive: address to bytes."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.device.type != "meta")
    storages = (x.untyped_storage() for x in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
