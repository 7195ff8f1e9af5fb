"""Runs instructions over the ranks of this process, and keeps back the reductions that later backwards add to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.language.errors import CaptureError, ShardingError, note_place_in_model
from shardc.ops.contraction import BoundDot

from ..comm.comm import Comm, start_packed
from ..comm.failure import explained, is_communication
from ..comm.process_group import WAIT, in_range, is_profiled
from .code import RepeatedInstructions
from .instruction import Env, Instruction, Slot, plain_call, with_deaths, with_waits

Values = Sequence[Tensor | None]  # parallel to a program's inputs, or to its outputs
Places = Mapping[tuple[int, int], int]  # by slot and bucket member of a gather, the index of a program's output
Wait = Callable[[], Sequence[Any]]  # waits for a collective, and returns its results


def run(instructions: Iterable[Instruction], envs: Sequence[Env], comm: Comm | None, places: Places | None = None,
        into: Sequence[Values] = ()) -> None:  # fmt: skip
    """Run instructions, with one ``Env`` for each rank of ``comm`` that lives in this process.

    Collectives are started in program order, which is the same on every rank, and waited for before their first reader.
    ``into``: for each rank, parallel to the program's outputs, tensors that the gathers in ``places`` may write to.
    """
    if isinstance(instructions, RepeatedInstructions) and len(envs) == 1 and not is_profiled():
        if (code := instructions.code()) is not None:
            try:
                code.run(envs[0], lambda each, rows, buffer: _start(each, rows, comm, places or {}, into, buffer))
            except Exception as error:
                if (failed := code.instruction_of(error)) is not None:
                    _raise_located(error, failed, comm)
                raise
            return
    started: dict[int, tuple[Instruction, Wait]] = {}
    for each in instructions:
        for slot in each.waits:
            if slot in started:
                _finish(*started.pop(slot), envs, comm)
        if each.collective:
            rows = [[env[slot] for slot in each.reads] for env in envs]
            try:
                with in_range(each.name):
                    started[each.result] = each, _start(each, rows, comm, places or {}, into)
            except Exception as error:
                _raise_located(error, each, comm)
        else:
            _call(each, envs)
        for slot, env in product(each.dead, envs):
            env[slot] = None
    for each, wait in started.values():
        _finish(each, wait, envs, comm)


def _call(each: Instruction, envs: Sequence[Env]) -> None:
    """Run an instruction that is no collective."""
    call, result, has_range = each.call, each.result, bool(each.name) and is_profiled()
    try:
        for env in envs:
            if has_range:
                with in_range(each.name):
                    env[result] = call(env)
            else:
                env[result] = call(env)
    except Exception as error:
        _raise_located(error, each, None)


def _raise_located(error: Exception, each: Instruction, comm: Comm | None) -> NoReturn:
    """Raise the error of an instruction with its place in the model; of a collective, with the rank that is gone."""
    if each.collective and comm is not None and is_communication(error):
        axes = tuple(dict.fromkeys(part for parts in each.axes for part in parts))
        raise explained(_collective_text(each, axes), comm.ranks(axes)) from error.with_traceback(None)
    _add_location(error, each)
    raise error


def _collective_text(each: Instruction, axes: tuple[str, ...]) -> str:
    """``all_reduce_tp (down, model.py:14) over tp``; of a bucket the first value and the number of the others."""
    phase, _, rest = each.name.partition("/")
    module, _, name = rest.rpartition("/")
    module = "" if module == "(model)" else module
    place = [module if phase == "forward" else f"{phase} of {module}" if module else phase, each.line]
    if each.layout is not None:
        first, *others = each.layout.parts
        place.append(f"with {first.operand.name}" + (f" and {len(others)} more" if others else ""))
    return f"{name} ({', '.join(filter(None, place))}) over {', '.join(axes)}"


def _add_location(error: Exception, each: Instruction) -> None:
    """Add the line of the model to the error of an op; an index out of bounds comes from the user's data."""
    location = f"{each.line or 'the model'}, {each.name}"
    if isinstance(error, IndexError) or "out of bounds" in str(error):
        note_place_in_model(error, location)
    elif not isinstance(error, (CaptureError, ShardingError)):
        error.add_note(f"in {location}")


def _start(each: Instruction, rows: Sequence[Sequence[Any]], comm: Comm | None, places: Places, into: Sequence[Values],
           buffer: Tensor | None = None) -> Wait:  # fmt: skip
    """Start a collective of operands, one row for each rank, or of the ``buffer`` that contains them."""
    assert comm is not None, each
    if each.layout is not None and buffer is not None:
        return start_packed(comm, each.layout, [buffer])
    outputs = [places.get((each.result, member)) for member in range(len(each.reads))] if into else []
    targets = [[None if i is None else values[i] for i in outputs] for values in into]
    if each.layout is not None:
        return comm.start_bucket(each.layout, rows, targets)
    xs, own = [row[0] for row in rows], [target for target, *_ in targets]
    return comm.start(each.collective, xs, *each.args[1:], is_own=each.is_own, into=own)


def _finish(each: Instruction, wait: Wait, envs: Sequence[Env], comm: Comm | None) -> None:
    """Wait for the results of a collective, and store them in its slot."""
    try:
        with in_range(each.name + WAIT):
            results = wait()
    except Exception as error:
        _raise_located(error, each, comm)
    for env, result in zip(envs, results, strict=True):
        env[each.result] = result


Sums = list[dict[int, Tensor]]  # for each rank, by slot, the operands that are not reduced yet


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of earlier backwards; ``is_own``: nobody else reads their memory, so it may be added to in place."""

    sums: Sums
    is_own: bool


class Deferred:
    """The instructions of a backward part, of which those that write the slots ``deferred`` may run later.

    ``results``: the slots that the part returns. ``open``: the slots to be added up, which only deferred instructions
    read at the end. ``closing``: the deferred instructions alone. A slot's total is in the slot ``offset`` further.
    """

    def __init__(
        self, instructions: Sequence[Instruction], deferred: Collection[int], results: Collection[int], offset: int
    ) -> None:
        self._all, self._deferred, self._results, self._offset = list(instructions), deferred, set(results), offset
        closing = [each for each in instructions if each.result in deferred]
        self._before = [each for each in instructions if each.result not in deferred]
        self.open = {slot for each in closing for slot in each.reads} - set(deferred)
        self.closing = RepeatedInstructions(with_deaths(closing, self._results))
        self._parts: dict[tuple[bool, bool, bool], RepeatedInstructions] = {}

    def instructions(self, totals: Totals | None, is_last: bool) -> RepeatedInstructions:
        """The backward part that adds to ``totals``, if there are any, and reduces them if it ``is_last``."""
        key = totals is not None, totals is not None and totals.is_own, is_last
        if key not in self._parts:
            order = self._before
            if is_last:
                order = self._all if self._reads_open_slots_first else [*self._before, *self.closing]
            if totals is not None:
                order = self._with_additions(order, totals.is_own)
            kept = self._results if is_last else self.open | self._results
            self._parts[key] = RepeatedInstructions(with_deaths(with_waits(order), kept))
        return self._parts[key]

    @property
    def _reads_open_slots_first(self) -> bool:
        """Whether no instruction reads an open slot after a deferred instruction has read it."""
        read: set[int] = set()
        for each in self._all:
            if each.result in self._deferred:
                read.update(each.reads)
            elif not read.isdisjoint(each.reads):
                return False
        return True

    def _with_additions(self, order: Sequence[Instruction], is_own: bool) -> list[Instruction]:
        """The instructions, with an addition to the total of each open slot after its last reader that is not deferred.

        A contraction that nobody else reads adds to the total directly.
        """
        places, result = self._places(order), list[Instruction]()
        add = Tensor.add_ if is_own else torch.add
        for i, each in enumerate((*order, None)):
            slots = [slot for slot, place in places.items() if place == i]
            result += [plain_call(add, (Slot(slot + self._offset), Slot(slot)), slot) for slot in slots]
            if each is None:
                continue
            if places.get(each.result) == i + 1 and isinstance(each.target, BoundDot) and len(each.args) == 2:
                del places[each.result]
                target = each.target.add_to if is_own else each.target.plus
                args = Slot(each.result + self._offset), *each.args
                each = plain_call(target, args, each.result, each.name, each.line)
            result.append(each)
        return result

    def _places(self, order: Sequence[Instruction]) -> dict[int, int]:
        """For each open slot, the index of the instruction before which it is added to its total.

        The addition of a collective's result is delayed to its next reader, so that it does not wait.
        """
        places, end = dict.fromkeys(self.open, 0), len(order)
        for i, each in enumerate(order):
            for slot in self.open.intersection((each.result, *each.reads)):
                if each.result not in self._deferred:
                    places[slot] = end if each.collective and slot == each.result else i + 1
                elif places[slot] == end:
                    places[slot] = i
        return places


def move(sums: Sums, envs: Sequence[Env], offset: int = 0) -> None:
    """Move sums into slots, each ``offset`` further than its own."""
    for env, values in zip(envs, sums, strict=True):
        for slot in list(values):
            env[offset + slot] = values.pop(slot)
