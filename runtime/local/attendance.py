"""Which groups come to an outer step: all of them, or those that are there once others have waited long enough."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..comm.failure import default_store, explained, job_timeout, own_group
from ..comm.process_group import Group
from .groups import Groups

PAUSE = 0.01  # seconds between two looks at who is there
WAITING = "an outer step of all groups"


@dataclass(frozen=True, slots=True)
class Round:
    """The groups in an outer step. ``line``: this rank and those that store the same shards in the other groups.

    ``device``: on which they send tensors. ``counted``: the groups whose changes count, by their index in ``line``;
    others were left out of the last outer step, and take what the first of these has.
    """

    line: Group
    device: torch.device
    counted: tuple[int, ...]

    @property
    def is_counted(self) -> bool:
        """Whether this group's changes count."""
        return self.line.index in self.counted

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Let groups that do not count have the tensors of the first one that does."""
        source = self.line.order[self.counted[0]]
        for each in tensors if len(self.counted) < self.line.size else ():
            sent = each.to(self.device).contiguous()
            self.line.process.broadcast(sent, source).wait()
            if not self.is_counted:
                each.copy_(sent)


class Attendance:
    """Finds the groups of each outer step of one module.

    With ``patience`` the first rank of each group says in the job's store that it has come. The first that has waited so
    long, with half of all groups or more, decides who takes part, for all. State, by what an outer step is of:
    ``_next``, the number of the next one; ``_behind``, those for which this group was left out of the last.
    """

    def __init__(self, groups: Groups, number: int) -> None:
        self.groups, self.patience = groups, groups.option.patience
        self._store = None if self.patience is None else PrefixStore(f"shardc/outer/{number}", default_store())
        self._next, self._behind = Counter[Hashable](), set[Hashable]()
        self._asked = 0

    def round(self, what: Hashable) -> Round | None:
        """The groups in the next outer step of these parameters; None if this group is left out of it."""
        if self._store is None:
            everyone = tuple(range(self.groups.count))
            return Round(self.groups.line, self.groups.comm.device, everyone)
        present = self._agreed(what)
        if str(self.groups.index) not in present:
            self._behind.add(what)
            return None
        self._behind.discard(what)
        members = sorted(map(int, present))
        level = tuple(i for i, group in enumerate(members) if present[str(group)])
        return Round(*self._line(members), level or (0,))

    def _line(self, members: Sequence[int]) -> tuple[Group, torch.device]:
        groups = self.groups
        if len(members) == groups.count:
            return groups.line, groups.comm.device
        ranks, cpu = tuple(groups.ranks[member] for member in members), torch.device("cpu")
        order, index = tuple(range(len(ranks))), members.index(groups.index)
        process = own_group("outer", ranks, WAITING) if len(ranks) > 1 else groups.line.process
        return Group(process, len(ranks), index, order, adds_locally=True), cpu

    def _agreed(self, what: Hashable) -> dict[str, bool]:
        """The groups in an outer step, and whether each was in the last, as the first rank of this group finds it."""
        assert self._store is not None
        self._asked += 1
        answer = f"group {self.groups.index}/{self._asked}"
        if self.groups.is_first:
            self._store.set(answer, json.dumps([self._decided(what), self._next[what]]))
        self._wait(answer)
        present, self._next[what] = json.loads(self._store.get(answer))
        return present  # type: ignore[no-any-return]

    def _decided(self, what: Hashable) -> dict[str, bool]:
        assert self._store is not None and self.patience is not None
        store, key, own = self._store, f"{what}/{self._next[what]}", self.groups.index
        is_late = store.check([f"{key}/all"])
        if not is_late:
            store.set(f"{key}/{own}", json.dumps(what not in self._behind))
        start = time.monotonic()
        while not store.check([f"{key}/all"]):
            here = [i for i in range(self.groups.count) if store.check([f"{key}/{i}"])]
            is_over = time.monotonic() - start > self.patience and 2 * len(here) >= self.groups.count
            if is_over or len(here) == self.groups.count:
                present = {i: json.loads(store.get(f"{key}/{i}")) for i in here}
                store.compare_set(f"{key}/all", "", json.dumps(present))
            elif time.monotonic() - start > job_timeout().total_seconds():
                raise explained(WAITING, self.groups.ranks)
            time.sleep(PAUSE)
        present = json.loads(store.get(f"{key}/all"))
        self._next[what] += 1
        while store.check([f"{what}/{self._next[what]}/all"]):  # outer steps that the others have taken meanwhile
            self._next[what] += 1
        return present  # type: ignore[no-any-return]

    def _wait(self, key: str) -> None:
        assert self._store is not None
        start = time.monotonic()
        while not self._store.check([key]):
            if time.monotonic() - start > job_timeout().total_seconds() + (self.patience or 0):
                raise explained(WAITING, self.groups.ranks)
            time.sleep(PAUSE)
