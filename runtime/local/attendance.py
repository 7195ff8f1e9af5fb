"""Attendance at outer steps: all groups take part, or those that have arrived when the others' patience ends."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..comm.failure import default_store, explained, job_timeout, own_group
from ..comm.process_group import Group
from .groups import Groups

PAUSE = 0.01  # seconds between two polls of the store
WAITING = "an outer step of all groups"


@dataclass(frozen=True, slots=True)
class Round:
    """The groups in an outer step. ``line``: this rank and those that store the same shards in the other groups.

    ``device``: the device on which they send tensors. ``counted``: the groups whose changes count, as indices in
    ``line``. The others were left out of the last outer step, and take the values of the first counted group.
    """

    line: Group
    device: torch.device
    counted: tuple[int, ...]

    @property
    def is_counted(self) -> bool:
        """Whether this group's changes count."""
        return self.line.index in self.counted

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors of the first counted group to the groups that are not counted."""
        source = self.line.order[self.counted[0]]
        for each in tensors if len(self.counted) < self.line.size else ():
            sent = each.to(self.device).contiguous()
            self.line.process.broadcast(sent, source).wait()
            if not self.is_counted:
                each.copy_(sent)


@dataclass(slots=True)
class Roll:
    """The groups at an outer step. ``here``: by index of a group, whether it took part in the last one.

    ``is_over``: no more groups are admitted.
    """

    here: dict[str, bool] = field(default_factory=dict)
    is_over: bool = False


class Attendance:
    """Finds the groups of each outer step of one module, which ``key`` identifies.

    With ``patience`` (seconds) the first rank of each group enters its group in a roll in the job's store. The roll is
    over once all groups are there, or once a group has waited for ``patience`` and at least half of them are there; the
    groups on it take the outer step. A group that has waited so long with fewer goes on by itself, and has missed
    nothing.

    State, by the key ``what`` of an outer step: ``_next``, the number of the next one; ``_behind``, those whose last
    step this group has missed. ``_lines``: by groups, this rank's line of groups that have met without the others.
    """

    def __init__(self, groups: Groups, key: str) -> None:
        self.groups, self.patience, self._purpose = groups, groups.option.patience, f"outer/{key}"
        self._store = PrefixStore(f"shardc/{self._purpose}", default_store())
        self._next, self._behind = Counter[Hashable](), set[Hashable]()
        self._asked, self._lines = 0, dict[tuple[int, ...], Group]()

    @property
    def everyone(self) -> Round:
        """A round of all groups, however long they wait for each other."""
        return Round(self.groups.line, self.groups.comm.device, tuple(range(self.groups.count)))

    def round(self, what: Hashable) -> Round | None:
        """The groups in the next outer step of these parameters; None if this group is not among them."""
        if self.patience is None:
            return self.everyone
        here, key, self._next[what] = self._answer(what)
        if str(self.groups.index) not in here:
            self._behind |= {what} if here else set()
            return None
        self._behind.discard(what)
        members = sorted(map(int, here))
        level = tuple(i for i, group in enumerate(members) if here[str(group)])
        return Round(*self._line(members, key), level or (0,))

    def _line(self, members: Sequence[int], name: str) -> tuple[Group, torch.device]:
        """This rank's line of some groups, and the device on which they send. ``name``: that of their first meeting."""
        groups, key = self.groups, tuple(members)
        if len(key) == groups.count:
            return groups.line, groups.comm.device
        if key not in self._lines:
            ranks = tuple(groups.ranks[member] for member in key)
            process = own_group(f"{self._purpose}/{name}", ranks, WAITING) if len(ranks) > 1 else groups.line.process
            order = tuple(range(len(ranks)))
            self._lines[key] = Group(process, len(ranks), key.index(groups.index), order, adds_locally=True)
        return self._lines[key], torch.device("cpu")

    def _answer(self, what: Hashable) -> tuple[dict[str, bool], str, int]:
        """The groups in an outer step, its name, and the number of the next one, from this group's first rank."""
        self._asked += 1
        answer = f"group {self.groups.index}/{self._asked}"
        if self.groups.is_first:
            self._store.set(answer, json.dumps(self._called(what)))
        start = time.monotonic()
        while not self._store.check([answer]):
            if time.monotonic() - start > job_timeout().total_seconds():
                raise explained(WAITING, self.groups.ranks)
            time.sleep(PAUSE)
        here, name, following = json.loads(self._store.get(answer))
        return here, name, following

    def _called(self, what: Hashable) -> tuple[dict[str, bool], str, int]:
        """Enter this group in the roll of an outer step, and wait until the roll is over.

        Returns no groups if patience ends before half of them are there; this group is then taken off the roll.
        """
        assert self.patience is not None
        number, own = self._next[what], str(self.groups.index)
        key, count, end = f"{what}/{number}", self.groups.count, time.monotonic() + self.patience
        roll = self._update(key, lambda roll: roll.here.update({own: what not in self._behind}))
        while not roll.is_over:
            is_late = time.monotonic() > end
            if len(roll.here) == count or (is_late and 2 * len(roll.here) >= count):
                roll = self._update(key, lambda roll: setattr(roll, "is_over", True))
            elif is_late:
                roll = self._update(key, lambda roll: roll.here.pop(own, None))
                if not roll.is_over:
                    return {}, key, number
            else:
                time.sleep(PAUSE)
                roll = self._update(key, lambda roll: None)
        while self._read(f"{what}/{number}").is_over:  # skip steps that the others have taken meanwhile
            number += 1
        return roll.here, key, number

    def _read(self, key: str) -> Roll:
        return Roll(*json.loads(self._store.get(key))) if self._store.check([key]) else Roll()

    def _update(self, key: str, change: Callable[[Roll], Any]) -> Roll:
        """Change a roll atomically unless it is over; return its current state."""
        while True:
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            roll = Roll(*json.loads(text)) if text else Roll()
            if roll.is_over:
                return roll
            change(roll)
            changed = json.dumps([roll.here, roll.is_over])
            if changed == text or self._store.compare_set(key, text, changed).decode() == changed:
                return roll
