"""The clock: start and end of tasks that share lanes and wait for each other. All predicted times come from it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf

from shardc.language.errors import ShardingError

ROUNDING = 1e-9  # relative error of sums of seconds that are added in another order
NOTHING: Mapping[Hashable, int] = {}  # most tasks make no value


@dataclass(frozen=True, slots=True)
class Task:
    """Work that takes time: a computation of a rank, a message, or a collective that several ranks enter together.

    It starts once all its ``lanes`` are free and every task named in ``after`` has ended, and occupies the lanes for
    ``seconds``. On the ranks of ``memory`` (by default its lanes) it ``reads`` values, ``makes`` new ones (name and
    bytes), and ``frees`` others at its end.
    """

    name: Hashable
    lanes: tuple[Hashable, ...]
    seconds: float = 0
    after: tuple[Hashable, ...] = ()
    reads: tuple[Hashable, ...] = ()
    makes: Mapping[Hashable, int] = field(default_factory=lambda: NOTHING)
    frees: tuple[Hashable, ...] = ()
    memory: tuple[Hashable, ...] | None = None

    def touches(self, rank: Hashable) -> bool:
        """Whether it reads, makes or frees values of a rank."""
        return rank in (self.lanes if self.memory is None else self.memory)


Rows = Mapping[Hashable, Sequence[int]]  # for each lane its tasks in order, by number


class Tasks:
    """Tasks by number, in the order given.

    ``num_after``: the number of tasks that each one waits for. ``readers``: the tasks that wait for it. Both ignore the
    order on lanes. ``title``: the owner of the tasks, for errors. Raises a ShardingError for a task that waits for a
    missing one.
    """

    __slots__ = ("_tasks", "lanes", "names", "num_after", "numbers", "readers", "seconds", "title")

    def __init__(self, tasks: Sequence[Task], title: str = "timeline") -> None:
        self.title, self._tasks = title, tasks
        self.names, self.lanes = [task.name for task in tasks], [task.lanes for task in tasks]
        self.seconds, self.num_after = [task.seconds for task in tasks], [len(task.after) for task in tasks]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.readers: list[list[int]] = [[] for _ in tasks]
        for number in range(len(tasks)):
            for before in self.after(number):
                self.readers[before].append(number)

    def after(self, number: int) -> list[int]:
        """The tasks that a task waits for, apart from the order on lanes."""
        task = self._tasks[number]
        try:
            return [self.numbers[name] for name in task.after]
        except KeyError:
            absent = ", ".join(str(name) for name in task.after if name not in self.numbers)
            what, problem = f"{task.name} waits for {absent}", "no such task runs"
            raise ShardingError(self.title, what, problem, "give it too") from None

    def rows(self) -> Rows:
        """The tasks of each lane in the order given."""
        rows: dict[Hashable, list[int]] = {}
        for number, lanes in enumerate(self.lanes):
            for lane in lanes:
                rows.setdefault(lane, []).append(number)
        return rows

    def run(self, rows: Rows, limit: float = inf) -> Clock:
        """Run the tasks of every lane in the order of its row, each as soon as possible, and in order of their ends.

        Stops once a task is bound to end after the ``limit``. Raises a ShardingError if tasks wait for each other in a
        circle.
        """
        clock, most = Clock(self, rows), limit * (1 + ROUNDING)
        left = {lane: sum(map(self.seconds.__getitem__, row)) for lane, row in rows.items()}
        queue = [(self.seconds[number], number) for number, count in enumerate(clock.missing) if not count]
        heapq.heapify(queue)
        while queue:
            end, number = heapq.heappop(queue)
            for lane in self.lanes[number]:
                left[lane] -= self.seconds[number]
                if end + left[lane] > most:
                    return clock
            for ready in clock.start(number):
                heapq.heappush(queue, (clock.arrived[ready] + self.seconds[ready], ready))
        if not clock.is_done:
            circle = " waits for ".join(str(self.names[number]) for number in clock.circle())
            raise ShardingError(self.title, circle, "no task of a circle can start", "order the lanes otherwise")
        return clock


class Clock:
    """The progress of tasks that are started one after the other.

    ``missing``: the number of tasks that each one still waits for, including the previous ones on its lanes.
    ``arrived``: the latest end of those that it no longer waits for. ``free``: the time at which each lane is free
    again. ``order``: the tasks in the order in which they were started.
    """

    __slots__ = ("_following", "_rows", "arrived", "ends", "free", "missing", "order", "starts", "tasks")

    def __init__(self, tasks: Tasks, rows: Rows | None = None) -> None:
        self.tasks, self._rows, num_tasks = tasks, rows or {}, len(tasks.names)
        self.missing = list(tasks.num_after)
        self.arrived: list[float] = [0] * num_tasks
        self.starts, self.ends = list(self.arrived), list(self.arrived)
        self.free: dict[Hashable, float] = {}
        self.order: list[int] = []
        self._following = {lane: iter(row[1:]) for lane, row in self._rows.items()}  # after the last one started
        for row in self._rows.values():
            for number in row[1:]:
                self.missing[number] += 1

    def start(self, number: int, now: float = 0) -> list[int]:
        """Start a task that waits for no other, not before ``now``. Return the tasks that are ready because of it."""
        assert not self.missing[number], self.tasks.names[number]
        start, lanes = max(now, self.arrived[number]), self.tasks.lanes[number]
        for lane in lanes:
            if (free := self.free.get(lane, 0)) > start:
                start = free
        self.starts[number] = start
        self.ends[number] = end = start + self.tasks.seconds[number]
        for lane in lanes:
            self.free[lane] = end
        self.order.append(number)
        ready, missing, arrived, readers = [], self.missing, self.arrived, self.tasks.readers[number]
        if self._following:
            readers = [*readers, *(after for lane in lanes for after in islice(self._following.get(lane, ()), 1))]
        for reader in readers:
            if end > arrived[reader]:
                arrived[reader] = end
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
        return ready

    @property
    def is_done(self) -> bool:
        """Whether all tasks have been started."""
        return len(self.order) == len(self.tasks.names)

    def reasons(self) -> dict[int, int]:
        """For each task that waited for others, the one that ended last."""
        return {number: max(waits, key=self.ends.__getitem__) for number, waits in self._waits().items() if waits}

    def circle(self) -> list[int]:
        """A circle of tasks, each waiting for the next one; the first stands at the end again."""
        waits, started = self._waits(), set(self.order)
        path = [next(number for number in waits if number not in started)]
        while path[-1] not in path[:-1]:
            path.append(next(before for before in waits[path[-1]] if before not in started))
        return path[path.index(path[-1]) :]

    def _waits(self) -> dict[int, list[int]]:
        """The tasks that each one waits for: those before it on its lanes, and those in its ``after``."""
        waits: dict[int, list[int]] = {number: [] for number in range(len(self.tasks.names))}
        for row in self._rows.values():
            for before, after in pairwise(row):
                waits[after].append(before)
        return {number: [*before, *self.tasks.after(number)] for number, before in waits.items()}
