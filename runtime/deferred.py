"""A backward some of whose reductions may wait for other backwards: what each makes for them is added up until then.

A value is added where it is made, while the processor has it at hand, and its memory is free for the next one's; a
matrix product is added by its own kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.ops.contraction import BoundDot

from .code import Part
from .instruction import Env, Instruction, Slot, plain_call, with_deaths, with_waits

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
