"""A warning where a hot axis sits on a slow link: the links of the machine laid on the mesh's axes in another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from shardc.announcement import collectives_of
from shardc.collective import Collective
from shardc.link import Link
from shardc.machine import Machine
from shardc.mesh import MICROBATCH
from shardc.partition import parse_part
from shardc.program import Program
from shardc.step_time import collective_seconds, on_machine
from shardc.text import bytes_text

GAIN = 0.8  # what is sent must take less than this part of its time for a warning


def slow_link_note(program: Program) -> str:
    """What is sent over the axis that loses most, how long that takes, and how it would be otherwise; or nothing."""
    links = _links(program)
    if len(set(links.values())) < 2:
        return ""
    found = collectives_of(program)
    now = _seconds(program, found, links)
    ways = [dict(zip(links, each, strict=True)) for each in permutations(links.values())]
    best = min(ways, key=lambda way: sum(_seconds(program, found, way).values()))
    then = _seconds(program, found, best)
    total, other = sum(now.values()), sum(then.values())
    if other >= GAIN * total:
        return ""
    axis = max(links, key=lambda name: now[name] - then[name])
    return _text(program, found, axis, links, best, (total, other))


def _links(program: Program) -> dict[str, Link]:
    """Of each axis of several ranks its link; none where the machine names no axis."""
    machine, mesh, pipeline = program.options.machine, program.mesh, program.options.pipeline
    if mesh is None or not machine.links:
        return {}
    names = [name for name, size in mesh.sizes.items() if size > 1 and name != MICROBATCH]
    names += [pipeline.axis] if pipeline and pipeline.axis not in names and program.num_stages > 1 else []
    return {name: machine.of_axis(name) for name in names}


def _seconds(program: Program, found: Sequence[Collective], links: Mapping[str, Link]) -> dict[str, float]:
    """For each axis how long its collectives take in a step, if these are the links; those of several axes in parts."""
    there = on_machine(program, Machine(links, program.options.machine.device))
    seconds = dict.fromkeys(links, 0.0)
    for each in found:
        names = _axes(program, each)
        for name in names:
            seconds[name] += each.times * collective_seconds(there, each) / len(names)
    return seconds


def _axes(program: Program, found: Collective) -> list[str]:
    assert program.mesh is not None
    known = [axis for axis in found.axes if axis != MICROBATCH]
    return [axis if found.kind == "send" else parse_part(axis, program.mesh).name for axis in known]


def _text(
    program: Program,
    found: Sequence[Collective],
    axis: str,
    links: Mapping[str, Link],
    best: Mapping[str, Link],
    seconds: tuple[float, float],
) -> str:
    over = [each for each in found if axis in _axes(program, each)]
    count, sent = sum(each.times for each in over), sum(each.times * each.wire_bytes for each in over)
    others = ", ".join(f"{name} on {link.name}" for name, link in best.items() if link is not links[name])
    return (
        f"axis {axis} is on {links[axis].name}: {count} collectives a step send {bytes_text(sent)} over it\n"
        f"    all that is sent takes {1e3 * seconds[0]:.3g} ms a step, and {1e3 * seconds[1]:.3g} ms with {others}\n"
        f"    lay the mesh so: ranks that differ in {axis} alone are those joined by {best[axis].name}"
    )
