"""Tasks on lanes: when each runs, what it waits for, and how many bytes live between them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from shardc.language.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time: a computation on one rank, a message, a collective that several ranks enter at once.

    It holds all its ``lanes`` while it runs, and starts once they are free and every task named in ``after`` has ended.
    In the ``memory`` of its lanes, or of the ranks that it names, it ``reads`` values, ``makes`` some (bytes by name)
    and ``frees`` others once it ends.
    """

    name: Hashable
    lanes: tuple[Hashable, ...]
    seconds: float = 0
    after: tuple[Hashable, ...] = ()
    reads: tuple[Hashable, ...] = ()
    makes: Mapping[Hashable, int] = field(default_factory=dict)
    frees: tuple[Hashable, ...] = ()
    memory: tuple[Hashable, ...] | None = None

    def touches(self, rank: Hashable) -> bool:
        """Whether it reads or makes values of that rank."""
        return rank in (self.lanes if self.memory is None else self.memory)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each task runs. ``reasons`` are the tasks whose end each of them waited for last, where it waited at all."""

    tasks: tuple[Task, ...]
    starts: Mapping[Hashable, float]
    reasons: Mapping[Hashable, Hashable]
    ranks: tuple[Hashable, ...]
    peak_bytes: tuple[int, ...]

    def end(self, task: Task) -> float:
        """In seconds from the first start."""
        return self.starts[task.name] + task.seconds

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in seconds."""
        return max((self.end(task) for task in self.tasks), default=0)

    def on(self, lane: Hashable) -> list[Task]:
        """What a rank or a channel does, in order."""
        return [task for task in self.tasks if lane in task.lanes]

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        return tuple(sum(task.seconds for task in self.on(rank)) for rank in self.ranks)

    @property
    def span(self) -> tuple[float, ...]:
        """Seconds from each rank's first computation to the end of its last."""
        return tuple(
            _span([(self.starts[t.name], self.end(t)) for t in self.on(rank) if t.seconds]) for rank in self.ranks
        )

    @property
    def bubble(self) -> float:
        """Seconds for which the busiest rank is idle within the makespan."""
        return self.makespan - max(self.work)

    @property
    def gap(self) -> float:
        """Seconds for which a rank is idle between its first computation and its last: the most of all ranks."""
        return max(span - work for span, work in zip(self.span, self.work, strict=True))

    @property
    def idle_fraction(self) -> float:
        """The part of all ranks' time within the makespan for which they are idle."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(self.work) / total if total else 0

    @property
    def critical_path(self) -> tuple[Task, ...]:
        """The tasks of which each waited for the one before: none may take longer without a longer makespan."""
        by_name = {task.name: task for task in self.tasks}
        last = max(self.tasks, key=self.end, default=None)
        path = []
        while last is not None:
            path.append(last)
            last = by_name.get(self.reasons.get(last.name))
        return tuple(reversed(path))

    def text(self, width: int = 100) -> str:
        """A picture of at most so many columns, a line a rank."""
        from shardc.schedules.picture import text

        return text(self, width)

    def svg(self) -> str:
        """A picture for a browser."""
        from shardc.schedules.picture import svg

        return svg(self)

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing and Perfetto."""
        from shardc.schedules.picture import chrome_trace

        return chrome_trace(self)


def _span(times: Sequence[tuple[float, float]]) -> float:
    return max(end for _, end in times) - min(start for start, _ in times) if times else 0


def timeline(
    tasks: Sequence[Task], ranks: Sequence[Hashable], resident: Mapping[Hashable, int] | None = None
) -> Timeline:
    """Run every lane's tasks in the order in which they are given, each as soon as it can.

    ``resident`` bytes lie on a rank from the start. Raises a ShardingError where tasks wait for each other in a circle,
    and where one reads or frees what does not live in its memory.
    """
    by_name = {task.name: task for task in tasks}
    waits = _waits(tasks)
    starts: dict[Hashable, float] = {}
    ends: dict[Hashable, float] = {}
    reasons: dict[Hashable, Hashable] = {}
    for name in _in_order(waits):
        if waits[name]:
            reasons[name] = max(waits[name], key=ends.__getitem__)
        starts[name] = ends[reasons[name]] if waits[name] else 0
        ends[name] = starts[name] + by_name[name].seconds
    by_end = [by_name[name] for name in sorted(ends, key=ends.__getitem__)]  # of one end in the order of waiting
    peaks = [peak_live([t for t in by_end if t.touches(rank)], rank, (resident or {}).get(rank, 0)) for rank in ranks]
    return Timeline(tuple(tasks), starts, reasons, tuple(ranks), tuple(peaks))


def _waits(tasks: Sequence[Task]) -> dict[Hashable, list[Hashable]]:
    """For each task the ones that end before it starts: before it on its lanes, and those it names."""
    lanes: dict[Hashable, list[Hashable]] = {}
    for task in tasks:
        for lane in task.lanes:
            lanes.setdefault(lane, []).append(task.name)
    waits: dict[Hashable, list[Hashable]] = {task.name: [] for task in tasks}
    for names in lanes.values():
        for before, after in pairwise(names):
            waits[after].append(before)
    for task in tasks:
        absent = [str(name) for name in task.after if name not in waits]
        if absent:
            raise ShardingError(
                "timeline", f"{task.name} waits for {', '.join(absent)}", "no such task runs", "give it too"
            )
        waits[task.name] += task.after
    return waits


def _in_order(waits: Mapping[Hashable, Sequence[Hashable]]) -> list[Hashable]:
    try:
        return list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        circle = " waits for ".join(map(str, reversed(error.args[1])))
        raise ShardingError("timeline", circle, "no task of a circle can start", "order the lanes otherwise") from None


def peak_live(tasks: Sequence[Task], rank: Hashable, resident: int = 0) -> int:
    """The most bytes that live on a rank after any of its tasks, in order; a ShardingError where one reads another."""
    live: dict[Hashable, int] = {}
    now = peak = resident
    for task in tasks:
        missing = [value for value in (*task.reads, *task.frees) if value not in live]
        if missing:
            what = f"{task.name} reads or frees {', '.join(map(str, missing))}"
            remedy = "make it before, free it after"
            raise ShardingError(f"memory of rank {rank}", what, "that does not live there then", remedy)
        assert not live.keys() & task.makes, (task.name, rank)
        live.update(task.makes)
        now += sum(task.makes.values()) - sum(live.pop(value) for value in task.frees)
        peak = max(peak, now)
    return peak


def rounded(number: float) -> float:
    """To six digits: what estimates have, the same on every machine."""
    return float(f"{number:.6g}")
