"""Gradient accumulation: backward parts whose reductions over ranks run once for several backwards.

Each backward adds the operands of these reductions to those of the backwards before it; the last one, or a reader of a
gradient, runs the reductions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.ops.contraction import BoundDot

from .code import RepeatedInstructions
from .instruction import Env, Instruction, Slot, plain_call, with_deaths, with_waits

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
