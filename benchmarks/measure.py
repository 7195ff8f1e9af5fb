"""One rank's part of a row: all its ways to train stay alive in the same processes, and take their steps in turn.

So a change of the machine's speed meets them all, and a ratio of two is of steps taken at nearly the same time.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from breakdown import OTHER_THREADS, STEP, Clock, Event, Spent, spent
from row import Row, is_ours
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from trainer import Trainer

from shardc.runtime.wire import sent_bytes

T = TypeVar("T")
SCENE = 2  # rounds of everyone; of those after them every sixth is, the others are of shardc and its fastest peer


@dataclass(frozen=True, slots=True)
class Steps:
    """How many rounds there are, in each of which a step is timed: from ``least`` to ``most``, as ``seconds`` allow.

    The seconds are for the row, from its start to its end. After ``latest`` of them there is no round more in any case.
    Three more steps are not timed.
    """

    least: int = 5
    most: int = 15
    seconds: float = math.inf
    latest: float = math.inf


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
        if not self.trainer.alone:
            self.counted_step()

    def step(self) -> Clock:
        """One step, with the next batch; how long it took."""
        start = Clock.now()
        if self.takes_part:
            with threads(self.trainer), record_function(STEP):
                batch = self._batches[len(self.report.losses) % len(self._batches)]
                self.report.losses.append(self.trainer.step(batch))
        return start.until_now()

    def timed_step(self, number: int) -> None:
        """A round's step, which all ranks begin together."""
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

    def profiled_step(self) -> None:
        """One step for the number of collectives, the peak of memory, and where the time goes."""
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
        self.report.spent = spent(_of_step(events), clock, list(self.report.steps.values()))

    def _weighed_step(self, start: float) -> None:
        """The first step, and what lives before its gradients are dropped, and after; ``start``: when all began."""
        if self.takes_part:
            with threads(self.trainer):
                self.report.losses.append(self.trainer.update(self._batches[0]))
            self.report.first_seconds = time.perf_counter() - start
            self.report.persistent = live_bytes()
            self.trainer.optimizer.zero_grad()
            self._between = live_bytes()


def measure(row: Row, steps: Steps) -> dict[str, Report]:
    """What this rank sees of everyone in a row."""
    begun = time.perf_counter()
    runners = [Runner(row, name) for name in row.names]
    forget_objects()  # collections do not walk what the others hold
    _take_rounds(runners, steps, begun)
    for runner in runners:
        runner.profiled_step()
    gc.unfreeze()
    return {runner.name: runner.report for runner in runners}


def _take_rounds(runners: Sequence[Runner], steps: Steps, begun: float) -> None:
    """Rounds until it would be too late for another, and for the steps that are profiled after them."""
    start, going_on, all_at_once = time.perf_counter(), runners, 0.0
    for i in range(steps.most):
        for runner in everyone_first(runners if i < SCENE or i % 6 == 5 else going_on, i):
            runner.timed_step(i)
        if i + 1 == SCENE:
            going_on, all_at_once = _decisive(runners), (time.perf_counter() - start) / SCENE
        if i + 1 < SCENE:
            continue
        end = time.perf_counter() - begun + 2.5 * all_at_once  # of another round, and of what is profiled
        if _rank_zero_says(end > (steps.seconds if i + 1 >= steps.least else steps.latest)):
            break


def everyone_first(runners: Sequence[T], i: int) -> list[T]:
    """In a round's order: everyone begins a round at times, and follows everyone."""
    first = i % len(runners)
    return [*runners[first:], *runners[:first]]


def _decisive(runners: Sequence[Runner]) -> list[Runner]:
    """shardc, and the fastest peer by rank 0's clock."""
    peers = [i for i, runner in enumerate(runners) if not runner.trainer.alone and not is_ours(runner.name)]
    best = {i: min(step.seconds for step in runners[i].report.steps.values()) for i in peers}
    fastest = _rank_zero_says(min(peers, key=lambda i: best[i]))
    return [runner for i, runner in enumerate(runners) if i == fastest or is_ours(runner.name)]


def _rank_zero_says(number: int) -> int:
    """Its number, to all."""
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)


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
