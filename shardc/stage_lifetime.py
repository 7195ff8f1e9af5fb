"""How long the values of one microbatch live in a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from shardc.node import operand
from shardc.ownership import dies_at, is_whole
from shardc.stage import PARTS, SCHEDULED, Part, Stages

Dying = Sequence[tuple[fx.Node, tuple[fx.Node, ...]]]  # calls in order, each with the values that die after it


def read_beside(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """What is read right after a part: what it adds to sums, and what is sent then."""
    ways = stages.crossings.items()
    sent = {node for way, nodes in ways if (way.source, way.part) == (index, part) for node in nodes}
    return sent | {operand(node) for node in stages.stages[index].sums[part]}


def kept_after(stages: Stages, index: int) -> dict[Part, set[fx.Node]]:
    """For each part that runs for every microbatch, the values that later parts of it read, or that are returned."""
    kept: dict[Part, set[fx.Node]] = {"count": set()}
    results = enumerate(stages.program.results)
    later = {node for i, node in results if node is not None and stages.home.get(i) == index}
    for part in reversed(SCHEDULED):
        kept[part] = later
        read = {each for node in stages.stages[index].parts[part] for each in node.all_input_nodes}
        later = later | read | read_beside(stages, index, part)
    return kept


def sums_in_place(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """Of the sums that a part adds to, those that may be made in the memory of their first summand."""
    program, calls = stages.program, stages.stages[index].parts[part]
    places = {node: i for i, node in enumerate(calls)}
    found: set[fx.Node] = set()
    for into in stages.stages[index].sums[part]:
        added = operand(into)
        if is_whole(added, program) and dies_at(added, into, places | {into: len(calls)}):
            found.add(into)
    return found


def with_deaths(stages: Stages, index: int) -> Mapping[Part, Dying]:
    """The calls of each part of a stage; what is made once a step lives to its end."""
    kept = kept_after(stages, index)
    found: dict[Part, Dying] = {part: [(node, ()) for node in stages.stages[index].parts[part]] for part in PARTS}
    for part, later in kept.items():
        seen, dying = later | read_beside(stages, index, part), list[tuple[fx.Node, tuple[fx.Node, ...]]]()
        for node in reversed(stages.stages[index].parts[part]):
            used = {node, *node.all_input_nodes}
            dying.append((node, tuple(used - seen)))
            seen |= used
        found[part] = dying[::-1]
    return found
