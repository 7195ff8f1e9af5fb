"""When everything in a schedule happens, and how many bytes of it live: its actions and messages as tasks on lanes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from shardc.action import RECEIVES, SENDS, Action, Edge, Schedule, edge_of
from shardc.schedule_run import edges_from, edges_into
from shardc.stage_cost import Costs, StageCost, costs_for
from shardc.timeline import Task, Timeline, peak_live, timeline


def simulate(schedule: Schedule, costs: Costs | StageCost | None = None) -> Timeline:
    """The schedule's timeline; without messages written into it they are sent as soon as they are made.

    A message starts once it is sent, its receive is posted and the channel is free, a stream for each pair of ranks and
    direction. F makes what it saves, which lives until B or I has run; what I holds for W lives until W has run; a
    message lives from where it is made until it is sent, and from where its receive is posted until it is read.
    """
    known = costs_for(schedule.num_stages, costs)
    written = schedule if schedule.has_messages else schedule.with_messages(costs=known)
    return timeline(tuple(tasks(written, known)), range(schedule.num_ranks), _resident(schedule, known))


def peak_bytes(schedule: Schedule, costs: Costs | StageCost | None = None) -> tuple[int, ...]:
    """The most bytes that live on each rank between two of its actions."""
    known = costs_for(schedule.num_stages, costs)
    written = schedule if schedule.has_messages else schedule.with_messages(costs=known)
    rows: list[list[Task]] = [[] for _ in schedule.actions]
    for task in tasks(written, known):
        if isinstance(task.name, Action):
            rows[schedule.place[task.name.stage]].append(task)
    resident = _resident(schedule, known)
    return tuple(peak_live(row, rank, resident[rank]) for rank, row in enumerate(rows))


def saved_bytes(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most bytes that each rank keeps for backward, with what is resident: the peak if messages had no bytes."""
    resident = _resident(schedule, costs)
    return tuple(
        max(accumulate((costs.stages[a.stage].change(a.kind) for a in row), initial=resident[rank]))
        for rank, row in enumerate(schedule.actions)
    )


def _resident(schedule: Schedule, costs: Costs) -> dict[Hashable, int]:
    resident: dict[Hashable, int] = dict.fromkeys(range(schedule.num_ranks), 0)
    for stage, rank in enumerate(schedule.place):
        resident[rank] += costs.stages[stage].resident
    return resident


@dataclass(frozen=True, slots=True)
class Message:
    """What goes over an edge for a microbatch: the value on both ranks, and the name of its transfer."""

    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        return f"{self.edge.source}→{self.edge.target} {self.edge.phase}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Saved:
    """What F leaves for backward (``F``), or I for W (``I``)."""

    by: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"what {self.stage}{self.by}{self.microbatch} saved"


def tasks(schedule: Schedule, costs: Costs) -> Iterator[Task]:
    """Every action on its rank and every transfer on its channel, each lane in the order in which it runs."""
    reading = _Reading(schedule, costs)
    for rank, action in schedule.walk():
        yield reading.task(rank, action)
        if action.kind in SENDS:
            yield reading.transfer(action)


@dataclass(slots=True)
class _Reading:
    """What actions read and make: the edges that enter and leave each stage in each phase, and their bytes."""

    schedule: Schedule
    costs: Costs
    entering: dict[tuple[int, str], list[Edge]] = field(init=False)
    leaving: dict[tuple[int, str], list[Edge]] = field(init=False)

    def __post_init__(self) -> None:
        phases = ("F",) if self.schedule.is_forward_only else ("F", "B")
        edges = [edge for edge in self.schedule.edges if edge.phase in phases]
        self.entering, self.leaving = edges_into(edges), edges_from(edges)

    def task(self, rank: int, action: Action) -> Task:
        """The action on its rank."""
        if action.kind in SENDS:
            message = Message(edge_of(action), action.microbatch)
            return Task(action, (rank,), reads=(message,), frees=(message,))
        if action.kind in RECEIVES:
            message = Message(edge_of(action), action.microbatch)
            return Task(action, (rank,), makes={message: self._bytes(message)})
        seconds = self.costs.seconds(action)
        if action.kind == "REDUCE":
            return Task(action, (rank,), seconds)
        read = self._read(action)
        arrived = [message for message in read if isinstance(message, Message) and self._is_sent(message.edge)]
        return Task(action, (rank,), seconds, tuple(arrived), read, self._made(action), read)

    def transfer(self, send: Action) -> Task:
        """The message on its channel, once both ends are there."""
        edge = edge_of(send)
        message = Message(edge, send.microbatch)
        ends = (send, edge.receive(send.microbatch))
        channel = (self.schedule.place[edge.source], self.schedule.place[edge.target])
        return Task(message, (channel,), self.costs.transfer_seconds(edge), ends)

    def _read(self, action: Action) -> tuple[Hashable, ...]:
        """What a computation reads, and is the last to read."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "W":
            return (Saved("I", stage, microbatch),)
        messages = [Message(edge, microbatch) for edge in self.entering.get((stage, action.phase), ())]
        saved = [Saved("F", stage, microbatch)] if action.phase == "B" else []
        return (*messages, *saved)

    def _made(self, action: Action) -> dict[Hashable, int]:
        stage, microbatch, cost = action.stage, action.microbatch, self.costs.stages[action.stage]
        made: dict[Hashable, int] = {}
        if action.makes_messages:
            messages = [Message(edge, microbatch) for edge in self.leaving.get((stage, action.phase), ())]
            made |= {message: self._bytes(message) for message in messages}
        if action.kind == "F" and not self.schedule.is_forward_only:
            made[Saved("F", stage, microbatch)] = cost.saved
        if action.kind == "I":
            made[Saved("I", stage, microbatch)] = cost.held
        return made

    def _bytes(self, message: Message) -> int:
        return self.costs.message_bytes.get(message.edge, 0)

    def _is_sent(self, edge: Edge) -> bool:
        return self.schedule.place[edge.source] != self.schedule.place[edge.target]
