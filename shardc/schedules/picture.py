"""Draws a timeline: as text, as SVG, and as the trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Hashable
from html import escape
from math import ceil

from shardc.schedules.schedule import COMPUTE, Action
from shardc.schedules.timeline import Task, Timeline

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
        f"makespan {timeline.makespan:g} s, bubble {timeline.bubble:g} s, longest gap {timeline.gap:g} s, "
        f"idle {timeline.idle_fraction:.2%}",
        f"peak bytes {', '.join(f'{peak:,}' for peak in timeline.peak_bytes)}",
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
    events: list[dict[str, object]] = []
    for process, (name, lanes) in enumerate({"computation": timeline.ranks, "communication": channels}.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, lane in enumerate(lanes):
            ids = {"pid": process, "tid": thread}
            events.append({"name": "thread_name", "ph": "M", **ids, "args": {"name": _title(lane)}})
            for task in (
                task for task in timeline.on(lane) if task.seconds
            ):  # ends are rounded like starts: no overlap
                start, end = round(timeline.starts[task.name] * 1e9), round(timeline.end(task) * 1e9)
                kind = getattr(task.name, "category", "") or _kind(task) or "message"
                times = {"ts": start / 1e3, "dur": (end - start) / 1e3}  # microseconds
                events.append({"name": str(task.name), "cat": kind, "ph": "X", **times, **ids})
    lines = ",\n  ".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n  {lines}\n]}}\n'
