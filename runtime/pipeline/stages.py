"""The stages of a pipeline, ready to run: the parts of their work, their values and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardc.costs.stages.lifetime import kept_after, read_beside, sums_in_place
from shardc.language.words import PARTS, Part
from shardc.program.node import operand
from shardc.program.stages import SCHEDULED, Stages

from ..comm.comm import Comm
from ..execute.executor import Rows
from ..execute.lower import lower
from ..execute.part import Env, PartRunner


@dataclass(slots=True)
class StepValues:
    """The values of one step. Each rank of a stage has an env, with a slot for each node of the program.

    ``of_step``: by stage, the values that all microbatches share. ``of_microbatch``: by stage and microbatch, the
    values of one. ``sums``: by stage, for each rank the sums over microbatches by slot.
    """

    of_step: dict[int, list[Env]] = field(default_factory=dict)
    of_microbatch: dict[tuple[int, int], list[Env]] = field(default_factory=dict)
    sums: dict[int, list[dict[int, Tensor]]] = field(default_factory=dict)

    def of_stage(self, stage: int, rank: int) -> Iterator[Env | dict[int, Tensor]]:
        """All containers of values of a stage on one of its ranks."""
        yield from (self.of_step[stage][rank], self.sums[stage][rank])
        yield from (envs[rank] for (each, _), envs in self.of_microbatch.items() if each == stage)


class StageRunner:
    """Runs the parts of one stage on envs.

    ``leaving`` and ``entering``: for each crossing the slots of its values; ``types``: the local types of those that
    enter. ``parameters``: the slots of the stage's parameters. ``sums[part]``: for each sum over microbatches its slot,
    the slot that the part adds to it, the reduction, and whether the first term may be written to. ``kept[part]``: the
    slots that later parts of a microbatch read; ``beside[part]``: the slots that are read right after the part.
    ``is_eager``: as in ``Executor``.
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
        parameters = {put.name: slots[node] for put, node in inputs if put.kind == "parameter"}
        self.parameters = {parameters[name] for name in self.stage.parameters}
        self.sums: dict[Part, list[tuple[int, int, str, bool]]] = {}
        for part, nodes in self.stage.sums.items():
            own = sums_in_place(stages, index, part)
            self.sums[part] = [(slots[node], slots[operand(node)], str(node.args[2]), node in own) for node in nodes]
        self.kept = {part: {slots[node] for node in nodes} for part, nodes in kept_after(stages, index).items()}
        self.beside = {part: {slots[node] for node in read_beside(stages, index, part)} for part in PARTS}
        self.parts: dict[Part, PartRunner] = {}
        for part, nodes in self.stage.parts.items():
            earlier = SCHEDULED[: SCHEDULED.index(part)] if part in SCHEDULED else ()  # in the same microbatch
            before = [node for each in earlier for node in self.stage.parts[each]]
            graph = lower(nodes, slots, comm.device, program, is_eager, before)
            read_later = self.kept[part] | self.beside[part] if part in self.kept else set(slots.values())
            self.parts[part] = PartRunner(graph, read_later, is_eager)

    def run(self, part: Part, envs: Sequence[Env], comm: Comm) -> None:
        self.parts[part].run(envs, comm)

    def forget(self, part: Part, envs: Sequence[Env]) -> None:
        """Free the values that are read right after a part and never again."""
        for slot in self.beside[part] - self.kept[part]:
            for env in envs:
                env[slot] = None


class StageResults:
    """Collects the results of a program from the values of a step.

    By index of the program's outputs: ``_slots``; ``_home``, the stage that computes an output of which every
    microbatch has a part; ``_absent``, a tensor on meta in place of a model's output that another rank computes.
    """

    def __init__(self, stages: Stages) -> None:
        program = stages.program
        slots = {node: slot for slot, node in enumerate(program.graph.nodes)}
        results = {i: node for i, node in enumerate(program.results) if node is not None}
        self._slots = {i: slots[node] for i, node in results.items()}
        self._home = {i: stage for i, stage in stages.home.items() if i in results}
        types = {i: program.local_type(results[i]) for i in self._home if program.outputs[i].kind == "output"}
        absent = [(i, type_) for i, type_ in types.items() if type_ is not None]
        self._absent = {i: torch.empty(type_.shape, dtype=type_.dtype, device="meta") for i, type_ in absent}
        self._count = len(program.results)

    def collect(self, values: StepValues, num_microbatches: int) -> Rows:
        """The results for each position, in the order of the program's outputs.

        A result that all microbatches share is one tensor.
        """
        common: Rows = []  # results that all microbatches share, from a rank's envs of all stages
        for envs_of_rank in zip(*values.of_step.values(), strict=True):
            row: list[Tensor | None] = [None] * self._count
            for i, slot in self._slots.items():
                if i not in self._home:
                    row[i] = next((env[slot] for env in envs_of_rank if env[slot] is not None), None)
            common.append(row)
        rows = []
        for microbatch in range(num_microbatches):
            for rank, row in enumerate(map(list, common)):
                for i, stage in self._home.items():
                    envs = values.of_microbatch.get((stage, microbatch))
                    row[i] = envs[rank][self._slots[i]] if envs else self._absent.get(i)
                rows.append(row)
        return rows
