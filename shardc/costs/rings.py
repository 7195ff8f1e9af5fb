"""The rings of a step, of attention and of products: bytes sent and held, and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.costs.count import call_seconds, chunk_seconds, collective_seconds, has_machine
from shardc.costs.records import RingEntry
from shardc.costs.replay import bytes_in_ring
from shardc.costs.stages.record import calls_of_step
from shardc.costs.step_time import COMPUTING, Slice, step_timeline
from shardc.language.text import bytes_text, seconds_text, table
from shardc.program.collective import GO_ROUND
from shardc.program.communication import collective_at, is_collective, ring_of
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.schedules.timeline import rounded


def rings_of(program: Program) -> tuple[RingEntry, ...]:
    """The rings of a step, of attention and of products, once the program is lowered; in a pipeline of all stages."""
    if program.level not in ("lowered", "localized"):
        return ()
    found = dict[tuple[Any, ...], list[RingEntry]]()
    rings = [(node, times) for node, times in calls_of_step(program) if node.target in GO_ROUND and is_collective(node)]
    waited = _waited_for(program) if rings else {}
    for node, times in rings:
        each = _ring_entry(program, node, times, waited)
        found.setdefault((each.phase, each.of, each.axes, each.steps, each.busiest), []).append(each)
    return tuple(map(_together, found.values()))


def _waited_for(program: Program) -> Mapping[str, float]:
    """For each collective, by name, the seconds for which its rank computes nothing until it ends."""
    if has_stages(program) or not has_machine(program):
        return {}
    waited = step_timeline(program).waited(COMPUTING)
    return {each.name: seconds for each, seconds in waited.items() if isinstance(each, Slice) and each.sent}


def _ring_entry(program: Program, node: fx.Node, times: int, waited_for: Mapping[str, float]) -> RingEntry:
    ring, sent = ring_of(node), collective_at(program, node)
    entry = RingEntry(
        program.source(node).phase, "products" if ring is None else "attention", sent.axes, times, sent.steps,
        times * sent.wire_bytes, bytes_in_ring(program, node), rounded(ring.imbalance if ring else 1.0),
    )  # fmt: skip
    if not has_machine(program):
        return entry
    computing, sending = call_seconds(program, node), collective_seconds(program, sent)
    waited = waited_for.get(node.name, 0.0)
    if has_stages(program):
        waited = max(0.0, sending - (computing - chunk_seconds(program, node)))
    return replace(entry, computing=times * computing, sending=times * sending, waited=times * waited)


def _together(rings: Sequence[RingEntry]) -> RingEntry:
    sums: dict[str, Any] = {name: rounded(sum(getattr(each, name) for each in rings)) for name in _times_of(rings)}
    sums |= {name: sum(getattr(each, name) for each in rings) for name in ("count", "wire_bytes")}
    return replace(rings[0], held=max(each.held for each in rings), **sums)


def _times_of(rings: Sequence[RingEntry]) -> list[str]:
    return [name for name in RING_TIMES if rings and getattr(rings[0], name) is not None]


RING_TIMES = {"computing": "computing", "sending": "sending", "waited": "waited for"}  # fields, each with its heading


def rings_text(rings: Sequence[RingEntry], is_pipeline: bool = False) -> str:
    """A table; empty without rings. In a pipeline they are those of all stages."""
    times = _times_of(rings)
    rows = [
        (
            each.phase, each.of, "+".join(each.axes), each.count, each.steps, bytes_text(each.wire_bytes),
            bytes_text(each.held), f"{each.busiest:.2f}", *(seconds_text(getattr(each, name)) for name in times),
        )
        for each in rings
    ]  # fmt: skip
    of = "rings of all stages" if is_pipeline else "rings of"
    header = ("phase", of, "axes", "count", "steps", "wire bytes", "held", "busiest / mean")
    return table((*header, *map(RING_TIMES.__getitem__, times)), rows) if rows else ""
