"""Offloading: the idle stages of a rank are in host memory, and move to the device before their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc.costs.stages.lifetime import ResidentStages

from ..execute.executor import Rows
from ..execute.part import Values
from ..tier.host import Host, stored_on_host
from .stages import StepValues


class Offload:
    """Moves the stages of one rank of the pipeline between device and host, in the order of ``turns``.

    Values that share memory move together and still share it afterwards. ``parameters``: by stage, the slots of its
    parameters; ``slots``: those of all parameters. Parameters are stored in host memory (``stored``, by slot, for each
    of the stage's ranks in this process), and the device gets copies. Other inputs never move: ``fixed`` has their
    addresses. ``marks``: by stage, the copies to wait for before its turn.
    """

    def __init__(self, host: Host, turns: ResidentStages, values: StepValues, inputs: Sequence[Values],
                 parameters: Mapping[int, set[int]], slots: set[int]) -> None:  # fmt: skip
        self.host, self.turns, self.values, self.marks = host, turns, values, dict[int, Any]()
        others = (value for row in inputs for i, value in enumerate(row) if i not in slots)
        self.fixed = {value.untyped_storage().data_ptr() for value in others if value is not None}
        self.width = len(next(iter(values.of_step.values())))
        own = set[int]().union(*parameters.values())
        self.stored = [
            {slot: _stored(value) for slot in own if (value := row[slot]) is not None} for row in inputs[: self.width]
        ]  # None where no op reads it
        for stage, own_slots in parameters.items():
            for env, stored in zip(values.of_step[stage], self.stored, strict=True):
                for slot in slots:
                    env[slot] = stored.get(slot) if slot in own_slots else None

    def take_turn(self) -> None:
        """Begin the next turn: move idle stages out, then bring the stages of this turn and the next to the device."""
        leaving, coming = self.turns.advance()
        for stage, i in product(leaving, range(self.width)):
            self._move_out(stage, i)
        for stage in coming:
            for i in range(self.width):
                self._bring_back(stage, i)
            self.marks[stage] = self.host.mark()
        self.host.wait(self.marks.get(self.turns.here[0]))

    def _move_out(self, stage: int, i: int) -> None:
        """Move a stage's values on its i-th rank to the host."""
        on_host = {copy.untyped_storage().data_ptr(): memory for copy, memory in self._copies(stage, i)}

        def move(value: Tensor) -> Tensor | OnHost:
            address = value.untyped_storage().data_ptr()
            is_elsewhere = value.device.type != self.host.device.type  # a seed or a step count on the CPU
            if is_elsewhere or address in self.fixed or not value.untyped_storage().nbytes():
                return value
            if address not in on_host:
                on_host[address] = self.host.copy_out(_memory_of(value))
            return OnHost.of(value, on_host[address])

        self._replace(stage, i, Tensor, move)

    def _bring_back(self, stage: int, i: int) -> None:
        """Move a stage's values on its i-th rank to the device, where other stages may have copies that it shares."""
        others = (pair for other in self.turns.here if other != stage for pair in self._copies(other, i))
        on_device = {id(memory): _memory_of(copy) for copy, memory in others}

        def move(value: OnHost) -> Tensor:
            if id(value.memory) not in on_device:
                on_device[id(value.memory)] = self.host.copy_back(value.memory)
            return value.within(on_device[id(value.memory)])

        self._replace(stage, i, OnHost, move)

    def _copies(self, stage: int, i: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The copies of a stage's parameters that are on the device, each with its memory on the host."""
        for slot, stored in self.stored[i].items():
            value = self.values.of_step[stage][i][slot]
            if isinstance(value, Tensor):
                yield value, stored.memory

    def _replace(self, stage: int, i: int, kind: type, move: Callable[[Any], Any]) -> None:
        """Move every value of a kind that a stage holds."""
        for env in self.values.of_stage(stage, i):
            for slot, value in list(env.items() if isinstance(env, dict) else enumerate(env)):
                if value is not None:
                    env[slot] = pytree.tree_map_only(kind, move, value)


def in_place_of_parameters(rows: Sequence[Sequence[Any]], is_on_host: Sequence[bool], host: Host) -> Rows:
    """A step's results in the memory of their owners: in host memory if ``is_on_host``, else on the device.

    A value that all microbatches share stays one tensor.
    """
    moved: dict[int, Tensor | None] = {}
    for row in rows:
        for value, to_host in zip(row, is_on_host, strict=True):
            if id(value) not in moved:
                moved[id(value)] = _result(value, to_host, host)
    host.finish()
    return [[moved[id(value)] for value in row] for row in rows]


def _result(value: Tensor | OnHost | None, to_host: bool, host: Host) -> Tensor | None:
    if isinstance(value, OnHost):
        return value.within(value.memory if to_host else host.copy_back(value.memory))
    if value is None or value.is_meta or not to_host:
        return value
    memory = host.copy_out(_memory_of(value))
    return OnHost.of(value, memory).within(memory)


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor in host memory. ``memory``: its bytes, which other tensors may share."""

    memory: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Tensor, memory: Tensor) -> OnHost:
        """``value`` in ``memory``, a copy of its memory on the host."""
        return cls(memory, value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))

    def within(self, memory: Tensor) -> Tensor:
        """The tensor in ``memory``, which is its memory or a copy of that."""
        start = memory.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start + self.offset, self.shape, self.stride)


def _stored(value: Tensor) -> OnHost:
    own = stored_on_host(value.detach().contiguous())
    return OnHost(own.view(-1).view(torch.uint8), own.dtype, tuple(own.shape), own.stride(), 0)


def _memory_of(value: Tensor) -> Tensor:
    """All memory that a value shares, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
