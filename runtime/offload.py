"""Stages of a rank in host memory while they are idle: parameters, sums, and what was saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shardc.stage_turns import Turns, turns_of

from .host import Host, OnHost, bytes_of, memory_of, stored_on_host

if TYPE_CHECKING:
    from .pipeline_step import PipelineStep


class Offload:
    """What moves the stages of one rank during a step, as ``turns`` says.

    State: ``stored``, for each of the stage's ranks in this process the parameters of our stages by slot, in host
    memory, where they stay: the device has copies. ``fixed``: where inputs that are no parameters lie, which stay too.
    ``marks``: by stage, to wait for before its turn.

    Values that share memory go together, and share it on the other side.
    """

    def __init__(self, step: PipelineStep, rank: int, host: Host) -> None:
        self.step, self.host, runner = step, host, step.runner
        self.turns, self.marks = Turns(turns_of(runner.stages, runner.schedule, rank)), dict[int, Any]()
        parameters = {i for i, put in enumerate(runner.program.inputs) if put.kind == "parameter"}
        given = (value for row in step.inputs for i, value in enumerate(row) if i not in parameters)
        self.fixed = {value.untyped_storage().data_ptr() for value in given if value is not None}
        held = {
            stage: each.parameters for stage, each in runner.runners.items() if runner.schedule.place[stage] == rank
        }
        self.stored = [
            {slot: _stored(row[slot]) for slot in set().union(*held.values())} for row in step.inputs[: step.width]
        ]
        for stage, slots in held.items():
            for env, stored in zip(step.base[stage], self.stored, strict=True):
                for slot in parameters:
                    env[slot] = stored[slot] if slot in slots else None

    def take_turn(self) -> None:
        """Begin the next turn: stages that are idle leave the device, and then those that are next come there."""
        leaving, coming = self.turns.take()
        for stage in leaving:
            self._move_out(stage)
        for stage in coming:
            self._bring_back(stage)
            self.marks[stage] = self.host.mark()
        self.host.wait(self.marks.get(self.turns.here[0]))

    def _move_out(self, stage: int) -> None:
        for i in range(self.step.width):
            known = {copy.untyped_storage().data_ptr(): memory for copy, memory in self._copies(stage, i)}
            self._replace(stage, i, Tensor, partial(self._moved_out, known))

    def _moved_out(self, known: dict[int, Tensor], value: Tensor) -> Tensor | OnHost:
        """``known``: by address the memory that is on the host already."""
        address = value.untyped_storage().data_ptr()
        if address in self.fixed or not value.untyped_storage().nbytes():
            return value
        if address not in known:
            known[address] = self.host.out(memory_of(value))
        return OnHost.of(value, known[address])

    def _bring_back(self, stage: int) -> None:
        for i in range(self.step.width):
            others = (each for other in self.turns.here if other != stage for each in self._copies(other, i))
            known = {id(memory): memory_of(copy) for copy, memory in others}
            self._replace(stage, i, OnHost, partial(self._brought_back, known))

    def _brought_back(self, known: dict[int, Tensor], value: OnHost) -> Tensor:
        """``known``: by id of memory on the host that of the device."""
        if id(value.memory) not in known:
            known[id(value.memory)] = self.host.back(value.memory)
        return value.within(known[id(value.memory)])

    def _copies(self, stage: int, i: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the parameters of a stage that are on the device, the copy there and the memory on the host."""
        for slot, stored in self.stored[i].items():
            value = self.step.base[stage][i][slot]
            if isinstance(value, Tensor):
                yield value, stored.memory

    def _replace(self, stage: int, i: int, kind: type, by: Callable[[Any], Any]) -> None:
        """Each value of a kind that a stage holds by what takes its place."""
        for held in self.step.held(stage, i):
            for slot, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                if value is not None:
                    held[slot] = pytree.tree_map_only(kind, by, value)


def _stored(value: Tensor | None) -> OnHost:
    assert value is not None
    own = stored_on_host(value.detach().contiguous())
    return OnHost(bytes_of(own), own.dtype, tuple(own.shape), own.stride(), 0)


def settled(rows: Sequence[Sequence[Any]], is_stored: Sequence[bool], host: Host) -> list[list[Tensor | None]]:
    """Results, each where it belongs: gradients in host memory if their parameter ``is_stored`` there."""
    made: dict[int, Tensor | None] = {}  # what is the same for all microbatches is one tensor, and stays one
    for row in rows:
        for value, on_host in zip(row, is_stored, strict=True):
            if id(value) not in made:
                made[id(value)] = _settled(value, on_host, host)
    host.finish()
    return [[made[id(value)] for value in row] for row in rows]


def _settled(value: Tensor | OnHost | None, is_stored: bool, host: Host) -> Tensor | None:
    if isinstance(value, OnHost):
        return value.within(value.memory if is_stored else host.back(value.memory))
    if value is None or value.is_meta or not is_stored:
        return value
    moved = OnHost.of(value, host.out(memory_of(value)))
    return moved.within(moved.memory)
