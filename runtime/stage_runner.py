"""One stage of a pipeline ready to run: the instructions of each part of its work, and what each part leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from shardc.node import operand
from shardc.stage import PARTS, SCHEDULED, Part, Stages

from .comm import Starter
from .executor import run
from .instruction import Env, Instruction, instructions, with_deaths, with_waits


class StageRunner:
    """The parts of one stage, over an ``Env`` with a slot for each node of the program for each rank.

    ``leaving`` and ``entering``: for each crossing the slots of its values. ``sums[part]``: what a part adds to, what
    is added, and how. ``kept[part]``: the slots that later parts of a microbatch read.
    """

    def __init__(self, stages: Stages, index: int, comm: Starter) -> None:
        self.stage, program = stages.stages[index], stages.program
        slots = {node: i for i, node in enumerate(program.graph.nodes)}
        ways = {crossing: [slots[node] for node in nodes] for crossing, nodes in stages.crossings.items()}
        self.leaving = {crossing: values for crossing, values in ways.items() if crossing.source == index}
        self.entering = {crossing: values for crossing, values in ways.items() if crossing.target == index}
        self.sums = {part: [_sum(node, slots) for node in nodes] for part, nodes in self.stage.sums.items()}
        calls = {
            part: with_waits(instructions(nodes, slots, comm.device, program, is_eager=True))
            for part, nodes in self.stage.parts.items()
        }
        own = [node for i, node in enumerate(program.results) if node and stages.home.get(i) == index]
        self.kept = self._find_kept(calls, {slots[node] for node in own})
        lasting = set(range(len(slots)))
        read = {part: self.kept[part] | self._read_beside(part) for part in (*SCHEDULED, "count")}
        self.calls = {part: with_deaths(calls[part], read.get(part, lasting)) for part in PARTS}

    def _find_kept(self, calls: Mapping[Part, list[Instruction]], returned: set[int]) -> dict[Part, set[int]]:
        kept: dict[Part, set[int]] = {"count": set()}
        later = returned
        for part in reversed(SCHEDULED):
            kept[part] = later
            later = later | {slot for each in calls[part] for slot in each.reads} | self._read_beside(part)
        return kept

    def _read_beside(self, part: Part) -> set[int]:
        """What is read right after a part: what it adds to sums, and what is sent then."""
        sent = {slot for crossing, slots in self.leaving.items() if crossing.part == part for slot in slots}
        return sent | {added for _, added, _ in self.sums[part]}

    def run(self, part: Part, envs: Sequence[Env], comm: Starter) -> None:
        """Run a part."""
        run(self.calls[part], envs, comm)

    def forget(self, part: Part, envs: Sequence[Env]) -> None:
        """Free what was read right after a part and is not read again."""
        for slot in self._read_beside(part) - self.kept[part]:
            for env in envs:
                env[slot] = None


def _sum(node: fx.Node, slots: Mapping[fx.Node, int]) -> tuple[int, int, str]:
    return slots[node], slots[operand(node)], str(node.args[2])
