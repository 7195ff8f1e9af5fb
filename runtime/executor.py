"""The executor of both runtimes: a program as a list of instructions, run over the ranks that live in this process.

A program runs in two parts. The *forward* part is what its outputs and new buffers need; the *backward* part is the
rest, and starts when the tangents are given. What is alive between the two is what is saved for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.lifetime import split
from shardc.program import Program

from .comm import Comm
from .instruction import Env, Instruction, instruction, with_deaths

Values = Sequence[Tensor | None]  # parallel to a program's inputs, or to its outputs


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward run keeps for the backward run: an ``Env`` for each rank, empty once it is freed."""

    envs: tuple[Env, ...]

    def take(self, keep: bool) -> tuple[Env, ...]:
        """The envs, to be used up, or copies to ``keep`` what is saved. RuntimeError if that was freed before."""
        if not all(self.envs):
            raise RuntimeError("a second backward through one forward: say retain_graph=True in the first")
        taken = tuple(list(env) for env in self.envs)
        if not keep:
            for env in self.envs:
                env.clear()
        return taken

    @property
    def tensors(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors alive, for each rank."""
        return (tuple(value for value in env if isinstance(value, Tensor)) for env in self.envs)


class Executor:
    """A program ready to run. Without a ``comm`` it runs on one device, where collectives are identities.

    It holds no values: several forward runs may wait for their backward.
    """

    def __init__(self, program: Program, comm: Comm | None = None, device: torch.device | str = "cpu") -> None:
        assert (comm is not None) == (program.level == "localized"), program.level
        self.program, self.comm = program, comm
        slots = {node: i for i, node in enumerate(program.graph.nodes)}
        self._num_slots = len(slots)
        self._inputs = [slots[node] for node in program.placeholders]
        self._results = [None if node is None else slots[node] for node in program.results]
        self._is_forward = [output.kind != "gradient" for output in program.outputs]
        place = comm.device if comm else torch.device(device)
        fwd, bwd = ([instruction(node, slots, place, comm is not None) for node in part] for part in split(program))
        self._kept = self._read_from_forward(bwd)
        self._fwd = with_deaths(fwd, self._kept | {slot for slot, _ in self._results_of(True)})
        self._bwd = with_deaths(bwd, {slot for slot, _ in self._results_of(False)})

    def forward(self, inputs: Sequence[Values]) -> tuple[list[list[Tensor | None]], Saved]:
        """Run the forward part: ``inputs`` for each rank, parallel to the program's, None for tangents.

        Returns for each rank the outputs, parallel to the program's, with None for gradients; and what is saved.
        """
        envs: list[Env] = [[None] * self._num_slots for _ in inputs]
        self._place(envs, inputs)
        self._run(self._fwd, envs)
        outputs = [self._collect(env, True) for env in envs]
        saved = tuple([value if i in self._kept else None for i, value in enumerate(env)] for env in envs)
        return outputs, Saved(saved)

    def backward(self, saved: Saved, tangents: Sequence[Values], keep: bool = False) -> list[list[Tensor | None]]:
        """Run the backward part: ``tangents`` for each rank, parallel to the program's inputs, None elsewhere.

        Returns for each rank the gradients, parallel to the program's outputs, with None for the others. Frees what
        was saved unless told to ``keep`` it. RuntimeError if that was freed before.
        """
        envs = saved.take(keep)
        self._place(envs, tangents)
        self._run(self._bwd, envs)
        return [self._collect(env, False) for env in envs]

    def keeps_input(self, index: int) -> bool:
        """Whether an input is saved for backward."""
        return self._inputs[index] in self._kept

    def keeps_output(self, index: int) -> bool:
        """Whether an output is saved for backward."""
        return self._results[index] in self._kept

    def _run(self, instructions: Iterable[Instruction], envs: Sequence[Env]) -> None:
        for each in instructions:
            if each.collective:
                self._communicate(each, envs)
            else:
                target, result, kwargs = each.target, each.result, each.kwargs
                for env in envs:
                    env[result] = target(*each.bound(env), **kwargs)
            for slot in each.dead:
                for env in envs:
                    env[slot] = None

    def _communicate(self, each: Instruction, envs: Sequence[Env]) -> None:
        operand = each.direct[0][1]
        act = getattr(self.comm, each.collective)
        results = act([env[operand] for env in envs], *each.args[1:], **each.kwargs)
        for env, result in zip(envs, results, strict=True):
            env[each.result] = result

    def _place(self, envs: Sequence[Env], inputs: Sequence[Values]) -> None:
        for env, values in zip(envs, inputs, strict=True):
            for slot, value in zip(self._inputs, values, strict=True):
                if value is not None:
                    env[slot] = value

    def _collect(self, env: Env, is_forward: bool) -> list[Tensor | None]:
        results: list[Tensor | None] = [None] * len(self._results)
        for slot, i in self._results_of(is_forward):
            results[i] = env[slot]
        return results

    def _results_of(self, is_forward: bool) -> Iterator[tuple[int, int]]:
        """The slot of each result of one part, and where among the program's outputs it stands."""
        for i, (slot, fwd) in enumerate(zip(self._results, self._is_forward, strict=True)):
            if slot is not None and fwd == is_forward:
                yield slot, i

    def _read_from_forward(self, bwd: Sequence[Instruction]) -> set[int]:
        """The slots that the backward part reads and does not make itself."""
        read = {slot for each in bwd for slot in each.reads} | {slot for slot, _ in self._results_of(False)}
        return read - {each.result for each in bwd}
