"""What a step of a pipeline returns, of what its stages hold at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from shardc.program import Program
from shardc.stage import Stages

from .instruction import Env


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
