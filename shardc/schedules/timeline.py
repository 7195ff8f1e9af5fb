"""A timeline of tasks on lanes, with the bytes alive on each rank, and its pictures: text, SVG, a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import ceil
from typing import Literal

from shardc.language.errors import ShardingError
from shardc.language.record import json_of
from shardc.language.text import bytes_text, seconds_text
from shardc.schedules.clock import Clock, Task, Tasks
from shardc.schedules.schedule import COMPUTE, Action
from shardc.schedules.trace import Sent, Trace, TraceArgs, TraceName, TraceSlice


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start of each task in seconds from the first one.

    ``clock``: the clock that started the tasks. ``ranks``: the lanes that compute. ``peak_bytes``: the most bytes alive
    on each of them.
    """

    tasks: tuple[Task, ...]
    starts: Mapping[Hashable, float]
    clock: Clock = field(repr=False, compare=False)
    ranks: tuple[Hashable, ...]
    peak_bytes: tuple[int, ...]

    def end(self, task: Task) -> float:
        """The end of a task, in seconds from the first start."""
        return self.starts[task.name] + task.seconds

    @property
    def reasons(self) -> Mapping[Hashable, Hashable]:
        """For each task that waited, the task whose end it waited for last."""
        names = self.clock.tasks.names
        return {names[number]: names[reason] for number, reason in self.clock.reasons().items()}

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((self.end(task) for task in self.tasks), default=0)

    def on(self, lane: Hashable) -> list[Task]:
        """The tasks of a rank or a channel, in order."""
        return [task for task in self.tasks if lane in task.lanes]

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        return tuple(sum(task.seconds for task in self.on(rank)) for rank in self.ranks)

    @property
    def span(self) -> tuple[float, ...]:
        """Seconds from the start of each rank's first computation to the end of its last."""
        rows = [[task for task in self.on(rank) if task.seconds] for rank in self.ranks]
        starts = [min((self.starts[task.name] for task in row), default=0) for row in rows]
        return tuple(max(map(self.end, row), default=0) - start for row, start in zip(rows, starts, strict=True))

    def waited(self, rank: Hashable) -> Mapping[Hashable, float]:
        """For each task, the seconds for which a rank computes nothing while it waits for the task's end."""
        waited, now, reasons = dict[Hashable, float](), 0.0, self.reasons
        for task in self.on(rank):
            start = self.starts[task.name]
            if start > now:
                waited[reasons[task.name]] = waited.get(reasons[task.name], 0.0) + start - now
            now = self.end(task)
        if self.makespan > now:
            last = max(self.tasks, key=self.end)
            waited[last.name] = waited.get(last.name, 0.0) + self.makespan - now
        return waited

    @property
    def bubble(self) -> float:
        """Seconds of the makespan in which the busiest rank is idle."""
        return self.makespan - max(self.work)

    @property
    def gap(self) -> float:
        """The most seconds that a rank is idle between its first and its last computation."""
        return max(span - work for span, work in zip(self.span, self.work, strict=True))

    @property
    def idle_fraction(self) -> float:
        """The idle fraction of all ranks' time, between 0 and 1."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(self.work) / total if total else 0

    @property
    def critical_path(self) -> tuple[Task, ...]:
        """Tasks up to the last end, each of which waited for the one before: a longer one delays that end."""
        by_name, reasons = {task.name: task for task in self.tasks}, self.reasons
        last = max(self.tasks, key=self.end, default=None)
        path = []
        while last is not None:
            path.append(last)
            last = by_name.get(reasons.get(last.name))
        return tuple(reversed(path))


def timeline(
    tasks: Sequence[Task], ranks: Sequence[Hashable], resident: Mapping[Hashable, int] | None = None
) -> Timeline:
    """Run the tasks of every lane in the order given, each as soon as possible.

    ``resident``: bytes that are allocated on a rank from the start. Raises a ShardingError if tasks wait for each other
    in a circle, or if one reads or frees a value that is not alive in its memory.
    """
    numbered = Tasks(tasks)
    clock, names = numbered.run(numbered.rows()), numbered.names
    in_order = [tasks[number] for number in clock.order]
    peaks = [peak_live([t for t in in_order if t.touches(rank)], rank, (resident or {}).get(rank, 0)) for rank in ranks]
    starts = {names[number]: clock.starts[number] for number in clock.order}
    return Timeline(tuple(tasks), starts, clock, tuple(ranks), tuple(peaks))


def peak_live(tasks: Sequence[Task], rank: Hashable, resident: int = 0) -> int:
    """The most bytes alive on a rank after any of its tasks, which run in this order.

    Raises a ShardingError if a task reads or frees a value that is not alive.
    """
    live: dict[Hashable, int] = {}
    now = peak = resident
    for task in tasks:
        missing = [value for value in (*task.reads, *task.frees) if value not in live]
        if missing:
            what = f"{task.name} reads or frees {', '.join(map(str, missing))}"
            problem = "that does not live there then"
            raise ShardingError(f"memory of rank {rank}", what, problem, "make it before, free it after")
        assert not live.keys() & task.makes, (task.name, rank)
        live.update(task.makes)
        now += sum(task.makes.values()) - sum(live.pop(value) for value in task.frees)
        peak = max(peak, now)
    return peak


def rounded(seconds: float) -> float:
    """An estimate to six significant digits, so that it is the same on every machine."""
    return float(f"{seconds:.6g}")


COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b", "REDUCE": "#b279a2", "": "#9d9da1"}
ROW, WIDTH, MARGIN = 28, 960, 64  # pixels


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """One line for each rank, of at most ``width`` columns, time from left to right, dots while it is idle.

    A cell shows the kind and microbatch of a computation, preceded by the stage if ranks have several; the kind alone
    if there is no room. The makespan, the idle time and each rank's peak of bytes stand below.
    """
    labels = _labels(timeline)
    shortest = min((task.seconds for rank in timeline.ranks for task in timeline.on(rank) if task.seconds), default=0)
    room = max(map(len, labels.values()), default=0) + 1  # of the shortest computation
    columns = min(width, max(1, ceil(timeline.makespan / shortest * room) if shortest else 1))
    margin = max((len(_title(rank)) for rank in timeline.ranks), default=0)
    lines = [f"{_title(rank):{margin}} {_line(timeline, rank, columns, labels)}" for rank in timeline.ranks]
    return "\n".join([*lines, *_summary(timeline)]) + "\n"


def _line(timeline: Timeline, rank: Hashable, columns: int, labels: dict[Hashable, str]) -> str:
    cells, scale = ["."] * columns, columns / timeline.makespan if timeline.makespan else 0
    for task in timeline.on(rank):
        start, end = round(timeline.starts[task.name] * scale), round(timeline.end(task) * scale)
        label, room = labels[task.name], end - start
        shown = label if len(label) <= room else _kind(task)[:1]
        cells[start:end] = f"{shown:-<{room}}"[:room]
    return "".join(cells)


def _summary(timeline: Timeline) -> list[str]:
    return [
        f"makespan {seconds_text(timeline.makespan)}, bubble {seconds_text(timeline.bubble)}, "
        f"longest gap {seconds_text(timeline.gap)}, idle {timeline.idle_fraction:.2%}",
        f"peak {', '.join(map(bytes_text, timeline.peak_bytes))}",
    ]


def _labels(timeline: Timeline) -> dict[Hashable, str]:
    """The label of each task: a computation's kind and microbatch, and its stage if ranks have several."""
    ranks = {task.name: task.lanes[0] for task in timeline.tasks if isinstance(task.name, Action)}
    stages = {(rank, action.stage) for action, rank in ranks.items()}
    has_many = len(stages) > len({rank for rank, _ in stages})
    labels: dict[Hashable, str] = {task.name: _kind(task)[:1] for task in timeline.tasks}
    for action in ranks:
        if action.kind in COMPUTE:
            labels[action] = str(action) if has_many else f"{action.kind}{action.microbatch}"
    return labels


def _kind(task: Task) -> str:
    return task.name.kind if isinstance(task.name, Action) and task.name.kind in COLOURS else ""


def _title(lane: Hashable) -> str:
    """A rank by its number, a channel by the ranks at its ends; other lanes are strings."""
    return lane if isinstance(lane, str) else f"channel {lane}" if isinstance(lane, tuple) else f"rank {lane}"


def timeline_svg(timeline: Timeline) -> str:
    """One row for each rank, one box for each computation; boxes of the critical path have a black frame."""
    scale = (WIDTH - MARGIN) / timeline.makespan if timeline.makespan else 0
    height = ROW * len(timeline.ranks) + 2 * ROW
    critical, labels = {task.name for task in timeline.critical_path}, _labels(timeline)
    font = 'font-family="sans-serif" font-size="11"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>']
    for row, rank in enumerate(timeline.ranks):
        lines.append(f'<text x="4" y="{row * ROW + 18}">{escape(_title(rank))}</text>')
        boxes = [task for task in timeline.on(rank) if task.seconds]
        lines += [_box(timeline, task, labels[task.name], row, scale, task.name in critical) for task in boxes]
    for row, line in enumerate(_summary(timeline), len(timeline.ranks)):
        lines.append(f'<text x="4" y="{row * ROW + 18}">{escape(line)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(timeline: Timeline, task: Task, label: str, row: int, scale: float, is_critical: bool) -> str:
    x, width = MARGIN + timeline.starts[task.name] * scale, task.seconds * scale
    frame = ' stroke="black" stroke-width="1.5"' if is_critical else ' stroke="white"'
    title = f"{task.name}: {timeline.starts[task.name]:g} to {timeline.end(task):g} s"
    place = f'x="{x:.2f}" y="{row * ROW + 4}" width="{width:.2f}" height="{ROW - 8}"'
    name = f'<text x="{x + 2:.2f}" y="{row * ROW + 18}" fill="white">{escape(label)}</text>' if width > 18 else ""
    return f'<g><title>{escape(title)}</title><rect {place} fill="{COLOURS[_kind(task)]}"{frame}/>{name}</g>'


def chrome_trace(timeline: Timeline) -> str:
    """JSON with one process for computations and one for channels, and in them one thread for each rank or channel."""
    channels = {lane: None for task in timeline.tasks for lane in task.lanes if lane not in timeline.ranks}
    processes: tuple[tuple[Literal[0, 1], str, Iterable[Hashable]], ...] = (
        (0, "computation", timeline.ranks),
        (1, "communication", channels),
    )
    events: list[TraceName | TraceSlice] = []
    waited = {name: seconds for rank in timeline.ranks for name, seconds in timeline.waited(rank).items()}
    for process, name, lanes in processes:
        events.append(TraceName("process_name", process, 0, TraceArgs(name)))
        for thread, lane in enumerate(lanes):
            events.append(TraceName("thread_name", process, thread, TraceArgs(_title(lane))))
            for task in (
                task for task in timeline.on(lane) if task.seconds
            ):  # ends are rounded like starts: no overlap
                start, end = round(timeline.starts[task.name] * 1e9), round(timeline.end(task) * 1e9)
                kind = getattr(task.name, "category", "") or _kind(task) or "message"
                sent: Sent | None = getattr(task.name, "sent", None)
                args = sent and replace(sent, waited=round(waited.get(task.name, 0.0) * 1e6, 3))
                events.append(TraceSlice(str(task.name), kind, start / 1e3, (end - start) / 1e3, process, thread, args))
    lines = ",\n  ".join(json.dumps(event) for event in json_of(Trace(tuple(events)))["traceEvents"])
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n  {lines}\n]}}\n'
