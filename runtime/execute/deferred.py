"""Deferred reductions: gradients of several backwards are reduced once, from the sums of their operands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from shardc.program.coding.nodes import state_of

from .lower import PartGraph
from .part import Env, PartRunner
from .rewrite import with_sums, with_takers

Lower = Callable[[Sequence[fx.Node], Sequence[fx.Node]], PartGraph]  # of calls, and of the calls that run before them
Sums = list[dict[int, Tensor]]  # for each rank, by slot, the sums of operands that are not reduced yet


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of earlier backwards. ``is_own``: nobody else reads their memory, so they may be added to in place."""

    sums: Sums
    is_own: bool


class Deferred:
    """A backward part whose ``deferred`` calls may run once for several backwards.

    ``slots``: those of the program's nodes. ``kept``: the slots that the part returns. ``open``: the slots to be added
    up, which only deferred calls read at the end; residuals and momenta, which these read too, are given to the last
    run. The total of slot i is in slot ``len(slots)`` + i. ``taken``: gradients that a function may take, as in
    ``with_takers``.
    """

    def __init__(self, calls: Sequence[fx.Node], deferred: Collection[fx.Node], slots: Mapping[fx.Node, int],
                 kept: Collection[int], lower: Lower, taken: Mapping[int, tuple[int, int]]) -> None:  # fmt: skip
        self._calls, self._slots, self._kept, self._lower = calls, slots, set(kept), lower
        self._taken = taken
        self._now = [node for node in calls if node not in deferred]
        self._later = [node for node in calls if node in deferred]
        self._deferred = {slots[node] for node in self._later}
        read = set[fx.Node]().union(*(set(node.all_input_nodes) - set(state_of(node)) for node in self._later))
        self.open = {slots[each] for each in read if each not in deferred}
        self.closing = PartRunner(lower(self._later, self._now), self._kept)
        self._parts: dict[tuple[bool, bool, bool, bool], PartRunner] = {}

    def part(self, totals: Totals | None, is_last: bool, is_taken: bool = False) -> PartRunner:
        """The backward part that adds to ``totals``, if there are any, and that reduces if it ``is_last``.

        ``is_taken``: a function takes the gradients; it is in the last slot, after those of the totals.
        """
        key = totals is not None, totals is not None and totals.is_own, is_last, is_taken
        if key not in self._parts:
            together = self._calls if self._reads_open_slots_first else [*self._now, *self._later]
            part = self._lower(together if is_last else self._now, ())
            if totals is not None:
                with_sums(part, self.open, self._deferred, len(self._slots), totals.is_own)
            if is_taken:
                with_takers(part, self._taken, 2 * len(self._slots))
            self._parts[key] = PartRunner(part, self._kept if is_last else self.open | self._kept)
        return self._parts[key]

    @property
    def _reads_open_slots_first(self) -> bool:
        """Whether no call reads an open slot after a deferred call has read it."""
        read: set[fx.Node] = set()
        for node in self._calls:
            if self._slots[node] in self._deferred:
                read.update(node.all_input_nodes)
            elif not read.isdisjoint(node.all_input_nodes):
                return False
        return True


def move(sums: Sums, envs: Sequence[Env], offset: int = 0) -> None:
    """Move each sum into the slot ``offset`` after its own."""
    for env, values in zip(envs, sums, strict=True):
        for slot in list(values):
            env[offset + slot] = values.pop(slot)
