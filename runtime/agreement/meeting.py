"""Meetings: ranks that make a module compare their arguments before they make a process group.

The first time they meet in the store of the job: each rank compares its text with that of the rank that arrived first.
A rank that finds a difference, or that fails on its way, posts the outcome for all. Later they meet in their agreement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from shardc.language.errors import RankError, ShardingError, error_line
from shardc.language.mesh import Mesh

from ..comm.failure import default_store, explained, is_one_gone, job_timeout, waiting
from .agreement import PATIENCE, Agreement, agreement_of, failure
from .entry import Entry, Kind
from .gate import Gate, difference_of, digest

MAKING = "parallelize, which all ranks of a mesh call"
LOOK = 0.1  # seconds between two polls of the other ranks' places
PAUSE = 0.02  # seconds between two polls of the outcome, at most


def ranks_of(mesh: Any, runtime: str) -> list[int]:
    """The ranks of the job that make a module together on this mesh; empty if it runs in this process alone.

    For a mesh that does not fit the job, which is an error, these are all ranks of the job.
    """
    if not dist.is_initialized() or (runtime != "distributed" and isinstance(mesh, Mesh)) or runtime == "virtual":
        return []
    everyone = list(range(dist.get_world_size()))
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
    else:
        ranks = [mesh.rank(position) for position in range(mesh.size)] if isinstance(mesh, Mesh) else everyone
    return ranks if set(ranks) <= set(everyone) and dist.get_rank() in ranks else everyone


@contextmanager
def making(ranks: Sequence[int], asked: Mapping[str, Any]) -> Iterator[Meeting | None]:
    """Context in which the ranks make a module together: an error on one rank is raised on all of them."""
    agreement = agreement_of(ranks) if ranks else None
    if agreement is None:
        yield None
        return
    meeting = Meeting(agreement, asked)
    try:
        yield meeting
    except RankError:
        raise
    except Exception as error:
        meeting.tell(error)
        raise
    meeting.end()


class Meeting:
    """This rank's part in making a module. ``asked``: the arguments that must be equal on all ranks, by name.

    ``gate``: the module's gate, once all ranks have met.
    """

    def __init__(self, agreement: Agreement, asked: Mapping[str, Any]) -> None:
        self.agreement, self.asked = agreement, asked
        self.gate: Gate | None = None
        self._is_in_store = not agreement.is_connected
        self._store, self._is_over = _StoreMeeting(agreement), False
        agreement.num_meetings += 1

    def meet(self, name: str, text: str) -> Gate:
        """Compare the class ``name`` and the lines of ``text`` on all ranks, and return the gate of the module.

        Raises a ShardingError on every rank if they differ, a RankError if another rank has failed.
        """
        gate = Gate(self.agreement, name, str(self.agreement.num_modules[""] + 1))
        if self._is_in_store:
            self._is_over = True  # all ranks know of any error that is raised from here on
            with waiting(lambda: MAKING, self.agreement.ranks):
                self._store.announce()
                self._store.meet(name, text)
            self._is_over = False
            self.agreement.connect()
        else:
            self._store.announce()
            entry = Entry(Kind.CONSTRUCT, b"", request=digest(f"{name}\n{text}"))
            try:
                gate.enter(entry, {"request": lambda: f"class {name}\n{text}"})
            except RankError:
                self._store.catch_up()
                raise
        self.agreement.num_modules[""] += 1
        self.gate = gate
        return gate

    def tell(self, error: Exception) -> None:
        """Let the other ranks know that this one has failed."""
        if self._is_over:
            return
        if self.agreement.is_connected:
            self.agreement.tell(error)
        else:
            self._store.tell(error)

    def end(self) -> None:
        """Finish the module together with all other ranks."""
        if self.gate is not None:
            self.gate.enter(Entry(Kind.CONSTRUCT, self.gate.digest))


class _StoreMeeting:
    """A meeting in the store of the job: the ``number``-th of these ranks, under keys of its own."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement, self.number = agreement, agreement.num_meetings
        self._rank = agreement.ranks[agreement.index]
        self._here = _place(agreement.ranks, self.number)
        self._places = PrefixStore("shardc/places", default_store())

    def announce(self) -> None:
        """Post the place of this rank, for ranks that wait for it elsewhere."""
        self._places.set(str(self._rank), json.dumps([self.agreement.ranks, self.number]))

    def meet(self, name: str, text: str) -> None:
        """Wait until all ranks are here with the same text. Raises the error that one of them has posted."""
        text, store = f"class {name}\n{text}", self._here
        if store.add("arrived", 1) == 1:
            store.set("first", json.dumps([self._rank, text]))
        rank, first = json.loads(store.get("first"))
        if first != text:
            pairs = sorted([(rank, first), (self._rank, text)])
            ranks, texts = [each for each, _ in pairs], [each for _, each in pairs]
            error = difference_of("request", ranks, texts, f"makes {name} with parallelize")
            self._post({"differs": error.parts})
        elif store.add("agreed", 1) == len(self.agreement.ranks):
            self._post({})
        outcome = self._awaited()
        if "failed" in outcome:
            store.add("read", 1)
            rank, message = outcome["failed"]
            raise failure(rank, message, f"makes {name} with parallelize")
        if "differs" in outcome:
            self._be_elsewhere(outcome.get("elsewhere"), error := ShardingError(*outcome["differs"]))
            raise error

    def tell(self, error: Exception) -> None:
        """Post that this rank has failed, and wait a few seconds for the others to read it."""
        self._post({"failed": [self._rank, error_line(error)]})
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._here.add("read", 0) < len(self.agreement.ranks) - 1:
            time.sleep(PAUSE)

    def _post(self, outcome: dict[str, Any]) -> None:
        """Post the outcome of the meeting, unless another rank has done so."""
        self._here.compare_set("outcome", "", json.dumps(outcome))

    def _awaited(self) -> dict[str, Any]:
        start, pause, looked = time.monotonic(), 0.001, time.monotonic()
        while not self._here.check(["outcome"]):
            now = time.monotonic()
            if now - start > job_timeout().total_seconds():
                raise explained(MAKING, self.agreement.ranks)
            if now - looked > LOOK:
                if is_one_gone(self.agreement.ranks):
                    raise explained(MAKING, self.agreement.ranks)
                self._look_for_others()
                looked = now
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)
        outcome: dict[str, Any] = json.loads(self._here.get("outcome"))
        return outcome

    def _place_of(self, rank: int) -> tuple[list[int], int] | None:
        """The last place of another rank: the ranks with which it was to make a module, and the meeting's number."""
        if not self._places.check([str(rank)]):
            return None
        ranks, number = json.loads(self._places.get(str(rank)))
        return ranks, number

    def _look_for_others(self) -> None:
        """Post an error if a rank of this mesh waits for this rank in a mesh of other ranks."""
        for rank in self.agreement.ranks:
            place = self._place_of(rank)
            if place is None or tuple(place[0]) == self.agreement.ranks or self._rank not in place[0]:
                continue
            ranks, number = place
            other = agreement_of(ranks)
            if other is None or number < other.num_meetings:
                continue  # this rank has attended that meeting
            one, two = sorted([(self._rank, list(self.agreement.ranks)), (rank, ranks)])
            texts = [f"rank {each} makes a module on ranks {', '.join(map(str, of))}" for each, of in (one, two)]
            who, what = f"ranks {one[0]} and {two[0]}", "they make a module on meshes of different ranks"
            error = ShardingError(who, what, "; ".join(texts), "give every rank the same mesh")
            self._post({"differs": error.parts, "elsewhere": place})
            return

    def _be_elsewhere(self, place: tuple[list[int], int] | None, error: ShardingError) -> None:
        """Post ``error`` for the ranks that wait at ``place``, if this rank belongs there and has not been there."""
        if place is None or self._rank not in place[0]:
            return
        ranks, number = place
        other = agreement_of(ranks)
        if other is None or number < other.num_meetings:
            return
        other.num_meetings = number + 1
        outcome = {"differs": error.parts, "elsewhere": [self.agreement.ranks, self.number]}
        _place(ranks, number).compare_set("outcome", "", json.dumps(outcome))
        if other.is_connected:
            other.tell(error)

    def catch_up(self) -> None:
        """Count the meeting that this rank has missed, if a rank that waited for it there has posted one."""
        place = json.loads(self._here.get("outcome")).get("elsewhere") if self._here.check(["outcome"]) else None
        if place is not None and self._rank in place[0] and (missed := agreement_of(place[0])) is not None:
            missed.num_meetings = max(missed.num_meetings, place[1] + 1)


def _place(ranks: Sequence[int], number: int) -> Any:
    """The part of the store in which these ranks meet for the ``number``-th time."""
    return PrefixStore(f"shardc/meeting/{'-'.join(map(str, ranks))}/{number}", default_store())
