"""The note on a mesh axis whose link is too slow for what is sent over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from shardc.costs.time import collective_seconds, on_machine
from shardc.language.machine import Link, Machine
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_part
from shardc.language.text import bytes_text
from shardc.program.collective import Collective
from shardc.program.program import Program
from shardc.program.traffic import collectives_of

GAIN = 0.8  # another assignment of links must take less than this part of the time


def slow_link_note(program: Program) -> str:
    """The axis that gains most from another assignment of links to axes, and the times of both; else an empty text."""
    machine, mesh, pipeline = program.options.machine, program.mesh, program.options.pipeline
    if mesh is None or not machine.links:
        return ""
    names = [name for name, size in mesh.sizes.items() if size > 1 and name != MICROBATCH]
    names += [pipeline.axis] if pipeline and pipeline.axis not in names and program.num_stages > 1 else []
    links = {name: machine.of_axis(name) for name in names}
    if len(set(links.values())) < 2:
        return ""
    collectives = collectives_of(program)
    now = _seconds_by_axis(program, collectives, links)
    assignments = [dict(zip(links, each, strict=True)) for each in permutations(links.values())]
    best = min(assignments, key=lambda each: sum(_seconds_by_axis(program, collectives, each).values()))
    then = _seconds_by_axis(program, collectives, best)
    if sum(then.values()) >= GAIN * sum(now.values()):
        return ""
    axis = max(links, key=lambda name: now[name] - then[name])
    over_axis = [each for each in collectives if axis in _axes(program, each)]
    count, sent = sum(each.times for each in over_axis), sum(each.times * each.wire_bytes for each in over_axis)
    others = ", ".join(f"{name} on {link.name}" for name, link in best.items() if link is not links[name])
    return (
        f"axis {axis} is on {links[axis].name}: {count} collectives a step send {bytes_text(sent)} over it\n"
        f"    all that is sent takes {1e3 * sum(now.values()):.3g} ms a step, "
        f"and {1e3 * sum(then.values()):.3g} ms with {others}\n"
        f"    lay the mesh so: ranks that differ in {axis} alone are those joined by {best[axis].name}"
    )


def _seconds_by_axis(
    program: Program, collectives: Sequence[Collective], links: Mapping[str, Link]
) -> dict[str, float]:
    """The time of each axis's collectives in a step over these links; those of several axes count in equal parts."""
    elsewhere = on_machine(program, Machine(links, program.options.machine.device))
    seconds = dict.fromkeys(links, 0.0)
    for each in collectives:
        names = _axes(program, each)
        for name in names:
            seconds[name] += each.times * collective_seconds(elsewhere, each) / len(names)
    return seconds


def _axes(program: Program, collective: Collective) -> list[str]:
    assert program.mesh is not None
    axes = [axis for axis in collective.axes if axis != MICROBATCH]
    return [axis if collective.kind == "send" else parse_part(axis, program.mesh).name for axis in axes]
