"""An executor that looks at the bytes alive of every rank after each instruction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardc.api import Compiled
from shardc.runtime.comm.comm import SimulatedComm
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instruction import Env, Instruction
from shardc.runtime.execute.interpreter import Values
from shardc.runtime.simulator import cut_inputs


def measured(compiled: Compiled, *args: Any, **kwargs: Any) -> dict[str, int]:
    """``saved`` and ``peak`` of a step on virtual ranks, of the rank where they are most."""
    program = compiled.program
    inputs = cut_inputs(program, compiled.inputs(program, args, kwargs))
    return MeasuringExecutor(program, SimulatedComm(compiled.mesh), is_eager=False).measure(inputs)


class MeasuringExecutor(Executor):
    """``given``: by rank the inputs, and what is kept of them; ``held``: the outputs; ``peak``: bytes."""

    given: list[list[Tensor]]
    held: Sequence[Values]
    peak: list[int]

    def measure(self, inputs: Sequence[Values]) -> dict[str, int]:
        self.given = [[value for value in values if value is not None] for values in inputs]
        self.held = [()] * len(inputs)
        self.peak = [0] * len(inputs)
        computed = self.update(inputs)
        for given, values in zip(self.given, computed, strict=True):
            given += [value for value in values if value is not None]
        self.held, saved = self.forward(inputs, computed)
        kept = [self._made(i, tensors) for i, tensors in enumerate(saved.tensors)]
        self.backward(saved, inputs)
        return {"saved": max(kept), "peak": max(self.peak)}

    def _run(
        self, instructions: Iterable[Instruction], envs: Sequence[Env], into: Sequence[Values] | None = None
    ) -> None:
        for each in instructions:
            super()._run((replace(each, dead=()),), envs, into)
            for i, env in enumerate(envs):
                alive = sum(value.nbytes for value in self.given[i]) + self._made(i, [*env, *self.held[i]])
                self.peak[i] = max(self.peak[i], alive)
                for slot in each.dead:
                    env[slot] = None

    def _made(self, rank: int, values: Iterable[Any]) -> int:
        """The bytes that some values of a rank own, those of inputs apart."""
        given = {value.untyped_storage().data_ptr() for value in self.given[rank]}
        found = {tensor.untyped_storage() for value in values for tensor in _tensors(value)}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
        return sum(size for address, size in sizes.items() if address not in given)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from filter(lambda entry: isinstance(entry, Tensor), value)
