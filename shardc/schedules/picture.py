"""A timeline as a picture: text, SVG, and the trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from html import escape
from math import ceil

from shardc.schedules.schedule import COMPUTE, Action
from shardc.schedules.timeline import Task, Timeline

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b", "REDUCE": "#b279a2", "": "#9d9da1"}
ROW, WIDTH, MARGIN = 28, 960, 64  # pixels


def text(found: Timeline, width: int = 100) -> str:
    """A line a rank, time from left to right, at most so many columns: computations from their start, dots while idle.

    A cell says kind and microbatch, and the stage before them where a rank has several; the kind alone where there is
    no room. Below are the makespan, the idle time and each rank's peak of bytes.
    """
    columns = min(width, max(1, _columns(found)))
    margin = max((len(_title(rank)) for rank in found.ranks), default=0)
    lines = [f"{_title(rank):{margin}} {_line(found, rank, columns)}" for rank in found.ranks]
    return "\n".join([*lines, *summary(found)]) + "\n"


def summary(found: Timeline) -> list[str]:
    """What the timeline comes to, a line each."""
    return [
        f"makespan {found.makespan:g} s, bubble {found.bubble:g} s, longest gap {found.gap:g} s, "
        f"idle {found.idle_fraction:.2%}",
        f"peak bytes {', '.join(f'{peak:,}' for peak in found.peak_bytes)}",
    ]


def _columns(found: Timeline) -> int:
    """Enough for the shortest computation to have the room of its name."""
    computed = [task for rank in found.ranks for task in found.on(rank) if task.seconds]
    room = max(map(len, _labels(found).values()), default=0) + 1
    return ceil(found.makespan / min(task.seconds for task in computed) * room) if computed else 1


def _line(found: Timeline, rank: object, columns: int) -> str:
    cells, scale = ["."] * columns, columns / found.makespan if found.makespan else 0
    labels = _labels(found)
    for task in found.on(rank):
        start, end = round(found.starts[task.name] * scale), round(found.end(task) * scale)
        label, room = labels[task.name], end - start
        shown = label if len(label) <= room else _kind(task)[:1]
        cells[start:end] = f"{shown:-<{room}}"[:room]
    return "".join(cells)


def _labels(found: Timeline) -> dict[Hashable, str]:
    """What each computation is called in its box."""
    actions = {task.name: task.lanes[0] for task in found.tasks if isinstance(task.name, Action)}
    stages = {(rank, action.stage) for action, rank in actions.items()}
    has_many = len(stages) > len({rank for rank, _ in stages})
    labels: dict[Hashable, str] = {task.name: _kind(task)[:1] for task in found.tasks}
    for action in actions:
        if action.kind in COMPUTE:
            labels[action] = str(action) if has_many else f"{action.kind}{action.microbatch}"
    return labels


def svg(found: Timeline) -> str:
    """A row a rank, a box a computation, titled with what it is and when; on the critical path it has a frame."""
    scale = (WIDTH - MARGIN) / found.makespan if found.makespan else 0
    height = ROW * len(found.ranks) + 2 * ROW
    critical, labels = {task.name for task in found.critical_path}, _labels(found)
    font = 'font-family="sans-serif" font-size="11"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>']
    for row, rank in enumerate(found.ranks):
        lines.append(f'<text x="4" y="{row * ROW + 18}">{escape(_title(rank))}</text>')
        boxes = [task for task in found.on(rank) if task.seconds]
        lines += [_box(found, task, labels[task.name], row, scale, task.name in critical) for task in boxes]
    for at, line in enumerate(summary(found)):
        lines.append(f'<text x="4" y="{(len(found.ranks) + at) * ROW + 18}">{escape(line)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(found: Timeline, task: Task, label: str, row: int, scale: float, is_critical: bool) -> str:
    x, width = MARGIN + found.starts[task.name] * scale, task.seconds * scale
    frame = ' stroke="black" stroke-width="1.5"' if is_critical else ' stroke="white"'
    title = f"{task.name}: {found.starts[task.name]:g} to {found.end(task):g} s"
    place = f'x="{x:.2f}" y="{row * ROW + 4}" width="{width:.2f}" height="{ROW - 8}"'
    name = f'<text x="{x + 2:.2f}" y="{row * ROW + 18}" fill="white">{escape(label)}</text>' if width > 18 else ""
    return f'<g><title>{escape(title)}</title><rect {place} fill="{COLOURS[_kind(task)]}"{frame}/>{name}</g>'


def _kind(task: Task) -> str:
    return task.name.kind if isinstance(task.name, Action) and task.name.kind in COLOURS else ""


def chrome_trace(found: Timeline) -> str:
    """JSON: a process for the ranks' computations and one for the channels, a thread for each of them, microseconds."""
    events: list[dict[str, object]] = []
    for process, lanes in enumerate((list(found.ranks), _channels(found))):
        name = ("computation", "communication")[process]
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, lane in enumerate(lanes):
            named = {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": _title(lane)}}
            events += [named, *_slices(found, lane, process, thread)]
    lines = ",\n  ".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n  {lines}\n]}}\n'


def _title(lane: object) -> str:
    """A rank by its number, a channel by the ranks at its ends; others are named."""
    return lane if isinstance(lane, str) else f"channel {lane}" if isinstance(lane, tuple) else f"rank {lane}"


def _channels(found: Timeline) -> list[object]:
    lanes = dict.fromkeys(lane for task in found.tasks for lane in task.lanes)
    return [lane for lane in lanes if lane not in found.ranks]


def _slices(found: Timeline, lane: object, process: int, thread: int) -> Iterator[dict[str, object]]:
    for task in found.on(lane):
        if task.seconds:
            start, end = (
                round(found.starts[task.name] * 1e9),
                round(found.end(task) * 1e9),
            )  # no two overlap by rounding
            where = {"pid": process, "tid": thread}
            kind = getattr(task.name, "category", "") or _kind(task) or "message"
            yield {
                "name": str(task.name),
                "cat": kind,
                "ph": "X",
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                **where,
            }
