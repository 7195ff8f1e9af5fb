"""One stage of a pipeline ready to run: the instructions of each part of its work, and what each part leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from shardc.node import operand
from shardc.stage import PARTS, SCHEDULED, Part, Stage, Stages
from shardc.stage_lifetime import kept_after, read_beside, sums_in_place

from . import code
from .comm import Starter
from .instruction import Env, instructions, with_deaths, with_waits
from .interpreter import run


class StageRunner:
    """The parts of one stage, over an ``Env`` with a slot for each node of the program for each rank.

    ``leaving`` and ``entering``: for each crossing the slots of its values. ``types``: of those that enter.
    ``parameters``: the slots of those that it holds. ``sums[part]``: what a part adds to, what is added, how, and
    whether the first that is added may be written to. ``kept[part]``: the slots that later parts of a microbatch read;
    ``beside[part]``: those that are read right after it. ``is_eager`` as of an ``Executor``.
    """

    def __init__(self, stages: Stages, index: int, comm: Starter, is_eager: bool = True) -> None:
        self.stage, program = stages.stages[index], stages.program
        slots = {node: i for i, node in enumerate(program.graph.nodes)}
        ways = {crossing: [slots[node] for node in nodes] for crossing, nodes in stages.crossings.items()}
        self.leaving = {crossing: values for crossing, values in ways.items() if crossing.source == index}
        self.entering = {crossing: values for crossing, values in ways.items() if crossing.target == index}
        types = {crossing: map(program.local_type, stages.crossings[crossing]) for crossing in self.entering}
        self.types = {crossing: [type_ for type_ in each if type_ is not None] for crossing, each in types.items()}
        inputs = zip(program.inputs, program.placeholders, strict=True)
        named = {put.name: slots[node] for put, node in inputs if put.kind == "parameter"}
        self.parameters = {named[name] for name in self.stage.parameters}
        self.sums = {
            part: [_sum(node, slots, node in in_place) for node in nodes]
            for part, nodes in self.stage.sums.items()
            for in_place in [sums_in_place(stages, index, part)]
        }
        calls = {
            part: with_waits(instructions(nodes, slots, comm.device, program, is_eager, _before(self.stage, part)))
            for part, nodes in self.stage.parts.items()
        }
        self.kept = {part: {slots[node] for node in nodes} for part, nodes in kept_after(stages, index).items()}
        self.beside = {part: {slots[node] for node in read_beside(stages, index, part)} for part in PARTS}
        lasting = set(range(len(slots)))
        read = {part: self.kept[part] | self.beside[part] for part in self.kept}
        self.calls = {part: code.Part(with_deaths(calls[part], read.get(part, lasting))) for part in PARTS}

    def run(self, part: Part, envs: Sequence[Env], comm: Starter) -> None:
        """Run a part."""
        run(self.calls[part], envs, comm)

    def forget(self, part: Part, envs: Sequence[Env]) -> None:
        """Free what was read right after a part and is not read again."""
        for slot in self.beside[part] - self.kept[part]:
            for env in envs:
                env[slot] = None


def _before(stage: Stage, part: Part) -> list[fx.Node]:
    """The calls that made what a part finds of its own microbatch."""
    earlier = SCHEDULED[: SCHEDULED.index(part)] if part in SCHEDULED else ()
    return [node for each in earlier for node in stage.parts[each]]


def _sum(node: fx.Node, slots: Mapping[fx.Node, int], is_own: bool) -> tuple[int, int, str, bool]:
    return slots[node], slots[operand(node)], str(node.args[2]), is_own
