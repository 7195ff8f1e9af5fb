"""One stage of a pipeline ready to run: the instructions of each part of its work, and what each part leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from shardc.costs.stage_lifetime import kept_after, read_beside, sums_in_place
from shardc.program.node import operand
from shardc.program.program import Program
from shardc.program.stages import PARTS, SCHEDULED, Part, Stage, Stages

from ..comm.comm import Comm
from ..execute import code
from ..execute.instruction import Env, instructions, with_deaths, with_waits
from ..execute.interpreter import run


class StageRunner:
    """The parts of one stage, over an ``Env`` with a slot for each node of the program for each rank.

    ``leaving`` and ``entering``: for each crossing the slots of its values. ``types``: of those that enter.
    ``parameters``: the slots of those that it holds. ``sums[part]``: what a part adds to, what is added, how, and
    whether the first that is added may be written to. ``kept[part]``: the slots that later parts of a microbatch read;
    ``beside[part]``: those that are read right after it. ``is_eager`` as of an ``Executor``.
    """

    def __init__(self, stages: Stages, index: int, comm: Comm, is_eager: bool = True) -> None:
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

    def run(self, part: Part, envs: Sequence[Env], comm: Comm) -> None:
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


class StageResults:
    """Where each result of a program is found.

    State, by index of the program's outputs: ``_slots``; ``_home``, for what every microbatch has a part of, the stage
    that makes it; ``_elsewhere``, what stands for an output that a stage of another rank makes.
    """

    def __init__(self, stages: Stages) -> None:
        program, nodes = stages.program, list(enumerate(stages.program.results))
        slots = {node: slot for slot, node in enumerate(program.graph.nodes)}
        self._slots = {i: slots[node] for i, node in nodes if node is not None}
        self._home = {i: stage for i, stage in stages.home.items() if i in self._slots}
        self._elsewhere = {
            i: _on_meta(program, node)
            for i, node in nodes
            if node is not None and i in self._home and program.outputs[i].kind == "output"
        }
        self._lasting = [(i, slot) for i, slot in self._slots.items() if i not in self._home]
        self._count = len(nodes)

    def collect(
        self, base: Mapping[int, Sequence[Env]], envs: Mapping[tuple[int, int], Sequence[Env]], num_microbatches: int
    ) -> list[list[Tensor | None]]:
        """For each position the results, parallel to the program's outputs.

        ``base``: by stage, for each of its ranks, what no microbatch changes; ``envs``: by stage and microbatch. What
        is the same for all microbatches is one tensor.
        """
        common = [self._common(held) for held in zip(*base.values(), strict=True)]
        return [
            self._of(microbatch, rank, envs, common[rank])
            for microbatch in range(num_microbatches)
            for rank in range(len(common))
        ]

    def _common(self, held: Sequence[Env]) -> list[Tensor | None]:
        row: list[Tensor | None] = [None] * self._count
        for i, slot in self._lasting:
            row[i] = next((env[slot] for env in held if env[slot] is not None), None)
        return row

    def _of(
        self, microbatch: int, rank: int, envs: Mapping[tuple[int, int], Sequence[Env]], common: list[Tensor | None]
    ) -> list[Tensor | None]:
        row = list(common)
        for i, stage in self._home.items():
            made = envs.get((stage, microbatch))
            row[i] = made[rank][self._slots[i]] if made else self._elsewhere.get(i)
        return row


def _on_meta(program: Program, node: fx.Node) -> Tensor:
    type_ = program.local_type(node)
    assert type_ is not None
    return torch.empty(type_.shape, dtype=type_.dtype, device="meta")
