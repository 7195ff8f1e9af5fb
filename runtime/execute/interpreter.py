"""Runs instructions over the ranks that live in this process: one after the other, or as the code made of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.language.errors import CaptureError, ShardingError, note_place_in_model
from shardc.ops.contraction import BoundDot

from ..comm.comm import Starter, start_packed
from .code import Code, Part
from .instruction import Env, Instruction, Slot, plain_call, with_deaths, with_waits
from .ranges import WAIT, in_range, in_ranges, is_profiled

Values = Sequence[Tensor | None]  # parallel to a program's inputs, or to its outputs


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that is under way."""

    instruction: Instruction
    results: Callable[[], Sequence[Any]]

    def finish(self, envs: Sequence[Env]) -> None:
        """Wait for its results and store them in the slots that later instructions read."""
        with in_range(self.instruction.name + WAIT):
            results = self.results()
        for env, result in zip(envs, results, strict=True):
            env[self.instruction.result] = result


def run(
    instructions: Iterable[Instruction],
    envs: Sequence[Env],
    comm: Starter | None,
    kept: Mapping[tuple[int, int], int] | None = None,
    into: Sequence[Values] = (),
) -> None:
    """Run instructions, an ``Env`` for each rank of ``comm`` that lives in this process.

    Collectives are started in the order of the program, which is the same on every rank, and waited for late.
    ``into``: for each rank tensors where what gathers make may be put, ``kept`` by slot and member.
    """
    if isinstance(instructions, Part) and len(envs) == 1 and not is_profiled():
        if (code := instructions.code()) is not None:
            _run_code(code, envs[0], comm, kept or {}, into)
            return
    started: dict[int, Started] = {}
    for each in in_ranges(instructions) if is_profiled() else instructions:
        for slot in each.waits:
            if slot in started:
                started.pop(slot).finish(envs)
        if each.collective:
            rows = [[env[slot] for slot in each.reads] for env in envs]
            with in_range(each.name):
                started[each.result] = Started(each, _start(each, rows, comm, kept or {}, into))
        else:
            _call(each, envs)
        for slot in each.dead:
            for env in envs:
                env[slot] = None
    for left in started.values():
        left.finish(envs)


def _call(each: Instruction, envs: Sequence[Env]) -> None:
    """Run an instruction that sends nothing."""
    call, result = each.call, each.result
    try:
        for env in envs:
            env[result] = call(env)
    except Exception as error:
        _note_place(error, each)
        raise


def _note_place(error: Exception, each: Instruction) -> None:
    """Say where in the model an op failed; an index that is out of bounds is in what the user gave."""
    place = f"{each.line or 'the model'}, {each.name}"
    if isinstance(error, IndexError) or "out of bounds" in str(error):
        note_place_in_model(error, place)
    elif not isinstance(error, (CaptureError, ShardingError)):
        error.add_note(f"in {place}")


def _run_code(
    code: Code, env: Env, comm: Starter | None, kept: Mapping[tuple[int, int], int], into: Sequence[Values]
) -> None:
    try:
        code.run(env, lambda each, rows, buffer: _start(each, rows, comm, kept, into, buffer))
    except Exception as error:
        if (each := code.place(error)) is not None:
            _note_place(error, each)
        raise


def _start(
    each: Instruction,
    rows: Sequence[Sequence[Any]],
    comm: Starter | None,
    kept: Mapping[tuple[int, int], int],
    into: Sequence[Values],
    buffer: Tensor | None = None,
) -> Callable[[], Sequence[Any]]:
    """Start a collective of operands, for each rank a row, or of the ``buffer`` they are in; what waits for it."""
    assert comm is not None, each
    places = _places(each, kept, into) if into else ()
    if each.flat is not None:
        return comm.start_bucket(each.flat, rows, places) if buffer is None else start_packed(comm, each.flat, [buffer])
    xs, first = [row[0] for row in rows], [place for place, *_ in places]
    return comm.start(each.collective, xs, *each.args[1:], is_own=each.is_own, into=first)


def _places(
    each: Instruction, kept: Mapping[tuple[int, int], int], into: Sequence[Values]
) -> list[list[Tensor | None]]:
    """Where the results of a collective may be put, for each rank a row."""
    results = [kept.get((each.result, i)) for i in range(len(each.reads))]
    return [[None if i is None else values[i] for i in results] for values in into]


Sums = list[dict[int, Tensor]]  # for each rank, by slot, what is not summed over ranks yet


@dataclass(frozen=True, slots=True)
class Totals:
    """What backwards before have added up; ``is_own``: no one else has its memory, so that it may be added to there."""

    sums: Sums
    is_own: bool


class Deferred:
    """The instructions of a backward, of which those that make the slots ``late`` may wait.

    ``results``: the slots that it returns. ``open``: the slots that are added up, which only what is late reads after.
    ``closing``: what is late, alone. The total of a slot is given in the slot that is ``first`` further.
    """

    def __init__(
        self, instructions: Sequence[Instruction], late: Collection[int], results: Collection[int], first: int
    ) -> None:
        self._all, self._late, self._results, self._first = list(instructions), late, set(results), first
        closing = [each for each in instructions if each.result in late]
        self._before = [each for each in instructions if each.result not in late]
        self.open = {slot for each in closing for slot in each.reads} - set(late)
        self.closing = Part(with_deaths(closing, self._results))
        self._known: dict[tuple[bool, bool, bool], Part] = {}

    def instructions(self, totals: Totals | None, is_last: bool) -> Part:
        """Those of a backward that adds to totals, if there are any; what is late runs if it ``is_last``."""
        key = totals is not None, totals is not None and totals.is_own, is_last
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, has_totals: bool, is_own: bool, is_last: bool) -> Part:
        order = self._before
        if is_last:
            order = self._all if self._is_read_late_last else [*self._before, *self.closing]
        added = self._added(order, is_own) if has_totals else order
        return Part(with_deaths(with_waits(added), self._results if is_last else self.open | self._results))

    @property
    def _is_read_late_last(self) -> bool:
        """Whether a value that is added up is never read by itself after something late has read it."""
        read: set[int] = set()
        for each in self._all:
            if each.result in self._late:
                read.update(each.reads)
            elif not read.isdisjoint(each.reads):
                return False
        return True

    def _added(self, order: Sequence[Instruction], is_own: bool) -> list[Instruction]:
        """The instructions, with an addition of each open slot where no one needs it by itself any more."""
        places, found = self._places(order), list[Instruction]()
        for i, each in enumerate((*order, None)):
            found += [self._addition(slot, is_own) for slot, place in places.items() if place == i]
            if each is not None and places.get(each.result) == i + 1 and _is_product(each):
                each = self._product(each, is_own)
                del places[each.result]
            if each is not None:
                found.append(each)
        return found

    def _places(self, order: Sequence[Instruction]) -> dict[int, int]:
        """For each open slot the instruction before which it is added: the next to the last that needs it by itself.

        What a collective makes is not waited for until it is read.
        """
        places, end = dict.fromkeys(self.open, 0), len(order)
        for i, each in enumerate(order):
            for slot in self.open.intersection((each.result, *each.reads)):
                if each.result not in self._late:
                    places[slot] = end if each.collective and slot == each.result else i + 1
                elif places[slot] == end:
                    places[slot] = i
        return places

    def _addition(self, slot: int, is_own: bool) -> Instruction:
        target = Tensor.add_ if is_own else torch.add
        return plain_call(target, (Slot(slot + self._first), Slot(slot)), slot)

    def _product(self, each: Instruction, is_own: bool) -> Instruction:
        """A contraction that is added as it is made."""
        assert isinstance(each.target, BoundDot), each
        target = each.target.add_to if is_own else each.target.plus
        return plain_call(target, (Slot(each.result + self._first), *each.args), each.result, each.name, each.line)


def move(sums: Sums, envs: Sequence[Env], first: int = 0) -> None:
    """Put sums into slots, each ``first`` further than its own, and hold them no longer."""
    for env, values in zip(envs, sums, strict=True):
        for slot in list(values):
            env[first + slot] = values.pop(slot)


def _is_product(each: Instruction) -> bool:
    """Whether it is a contraction without a bias."""
    return isinstance(each.target, BoundDot) and len(each.args) == 2
