"""Prints rows as Markdown tables, and writes them as JSON and as a plot."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
from figures import Figures, is_held, word
from row import Row

Found = Sequence[tuple[Row, list[Figures]]]
HEADER = (
    "plan", "size", "who", "rounds", "ms a step", "ms busy", "to one device", "to the best peer", "paired", "holds",
    "busy to peer", "first step s", "MB sent", "announced", "Psi", "calls", "MB kept", "MB peak", "loss off by",
)  # fmt: skip


def markdown(found: Found) -> str:
    """One line for each way to train in every row."""
    lines = [HEADER, tuple("-" * 3 for _ in HEADER)]
    lines += [_cells(row, each, everyone) for row, everyone in found for each in everyone]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def brief(found: Found) -> str:
    """One line for each of shardc's ways and the fastest peer of its row: the table of the README."""
    header = ("plan", "beside", "size", "step time", "(95 %)", "rounds", "MB sent", "theirs", "MB peak", "theirs")
    lines = [header, tuple("-" * 3 for _ in header)]
    for row, everyone in found:
        peers = {each.name: each for each in everyone}
        lines += [_beside(row, each, peers[each.peer]) for each in everyone if each.is_ours and each.peer]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _beside(row: Row, each: Figures, peer: Figures) -> tuple[str, ...]:
    assert each.to_peer is not None
    memory = _megabytes(each.peak), _megabytes(peer.peak)
    ratio = f"{each.to_peer.medians:.2f}", str(each.to_peer), str(len(each.samples))
    name = each.name if row.ways.microbatches == 1 else f"{each.name}, {row.ways.microbatches} microbatches"
    return (name, peer.name, row.title, *ratio, _megabytes(each.wire), _megabytes(peer.wire), *memory)


def _cells(row: Row, each: Figures, everyone: Sequence[Figures]) -> tuple[str, ...]:
    return (
        row.plan,
        row.title,
        each.name,
        str(len(each.samples)),
        f"{each.seconds * 1e3:.1f}",
        f"{each.busy * 1e3:.1f}",
        f"{each.to_device.medians:.2f}",
        f"{each.to_peer.medians:.2f}" if each.to_peer else "",
        str(each.to_peer or ""),
        word(is_held(each, row.ways.limit)) if each.is_ours else "",
        f"{each.busy / min(peer.busy for peer in everyone if peer.name in row.peers):.2f}" if each.is_ours else "",
        f"{each.first_seconds:.1f}",
        _megabytes(each.wire),
        _megabytes(each.announced),
        "" if each.multiple is None else f"{each.multiple:.2f}",
        str(each.collectives),
        _megabytes(each.persistent),
        _megabytes(each.peak),
        f"{each.loss_difference:.0e}",
    )


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.2f}"


def write(folder: Path, found: Found, said: str = "") -> None:
    """Write ``results.json`` with every sample, ``table.md`` with tables and verdicts, and ``steps.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{**_settings(row), "results": [asdict(each) for each in everyone]} for row, everyone in found]
    data = {"version": 2, "torch": torch.__version__, "machine": platform.machine(), "rows": rows, "said": said}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "table.md").write_text(f"{brief(found)}\n\n{markdown(found)}\n\n```\n{said}\n```\n")
    (folder / "steps.svg").write_text(svg(found))


def _settings(row: Row) -> dict[str, object]:
    return {"plan": row.plan, "size": row.size, **asdict(row.job), "dtype": str(row.job.dtype)}


def svg(found: Found) -> str:
    """A plot with a bar for each way to train: its step time as a multiple of one device's, with its interval."""
    bars: list[str] = []
    y = 20
    for row, everyone in found:
        bars.append(f'<text x="10" y="{y + 12}" font-weight="bold">{row.plan}, {row.title}</text>')
        y += 20
        for each in everyone:
            bars.append(_bar(each, y))
            y += 18
        y += 8
    size = f'width="760" height="{y + 10}" font-family="sans-serif" font-size="12"'
    title = '<text x="230" y="14">step time, one device = 1</text>'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', title, *bars, "</svg>\n"))


def _bar(each: Figures, y: int, left: int = 230, unit: int = 100) -> str:
    color = "#c33" if each.is_ours else "#579"
    found = each.to_device
    value, low, high = (left + unit * min(x, 5) for x in (found.medians, found.low, found.high))
    return (
        f'<text x="20" y="{y + 12}">{escape(each.name)}</text>'
        f'<rect x="{left}" y="{y + 2}" width="{value - left:.1f}" height="12" fill="{color}"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 8}" y2="{y + 8}" stroke="black"/>'
        f'<text x="{max(value, high) + 6:.1f}" y="{y + 12}">{found.medians:.2f}</text>'
    )
