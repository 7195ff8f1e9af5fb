"""Simulates a schedule: a timeline of all actions and messages, and the bytes alive on each rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from shardc.schedules.costs import Costs, StageCost, costs_for
from shardc.schedules.events import with_messages
from shardc.schedules.schedule import RECEIVES, SENDS, Action, Edge, Schedule, edge_of, edges_from, edges_into, operands
from shardc.schedules.timeline import Task, Timeline, peak_live, timeline


def simulate(schedule: Schedule, costs: Costs | StageCost | None = None) -> Timeline:
    """The timeline of a schedule; a compute-only schedule gets its messages first, each sent as soon as possible.

    A message starts once it is sent, its receive is posted and the channel is free; each ordered pair of ranks is a
    channel. The bytes that F saves live until B or I has run, those that I holds for W until W has run. A message lives
    on its source from its computation until it is sent, and on its target from its receive until it is read.
    """
    costs = costs_for(schedule.num_stages, costs)
    return timeline(tuple(_tasks(schedule, costs)), range(schedule.num_ranks), _resident(schedule, costs))


def peak_bytes(schedule: Schedule, costs: Costs | StageCost | None = None) -> tuple[int, ...]:
    """The most bytes alive on each rank between two of its actions."""
    costs = costs_for(schedule.num_stages, costs)
    rows: list[list[Task]] = [[] for _ in schedule.actions]
    for task in _tasks(schedule, costs):
        if isinstance(task.name, Action):
            rows[schedule.place[task.name.stage]].append(task)
    resident = _resident(schedule, costs)
    return tuple(peak_live(row, rank, resident[rank]) for rank, row in enumerate(rows))


def saved_bytes(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most bytes of each rank that are resident or saved for backward: the peak without messages."""
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
    """The values that cross an edge for one microbatch. It names them on both ranks, and their transfer."""

    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        return f"{self.edge.source}→{self.edge.target} {self.edge.phase}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Saved:
    """The values that an F keeps for backward, or an I for W."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"what {self.stage}{self.kind}{self.microbatch} saved"


def _tasks(schedule: Schedule, costs: Costs) -> Iterator[Task]:
    """Every action on its rank and every transfer on its channel, in the order of each of these lanes."""
    if not schedule.has_messages:
        schedule = with_messages(schedule, costs)
    tasks = _Tasks(schedule, costs)
    for rank, action in schedule.walk():
        yield tasks.action(rank, action)
        if action.kind in SENDS:
            yield tasks.transfer(action)


class _Tasks:
    """Makes the tasks of a schedule's actions and transfers."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        phases = ("F",) if schedule.is_forward_only else ("F", "B")
        edges = [edge for edge in schedule.edges if edge.phase in phases]
        self.entering, self.leaving = edges_into(edges), edges_from(edges)

    def action(self, rank: int, action: Action) -> Task:
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
        stage, microbatch = action.stage, action.microbatch
        saved = Saved("I" if action.kind == "W" else "F", stage, microbatch)
        entering = operands(action, self.entering)
        reads: tuple[Hashable, ...] = tuple(Message(edge, microbatch) if edge else saved for _, edge in entering)
        transfers = (each for each in reads if isinstance(each, Message) and self.schedule.is_crossing(each.edge))
        makes: dict[Hashable, int] = {}  # for messages and for backward
        if action.makes_messages:
            messages = [Message(edge, microbatch) for edge in self.leaving.get((stage, action.phase), ())]
            makes |= {message: self._bytes(message) for message in messages}
        if action.kind == "F" and not self.schedule.is_forward_only:
            makes[Saved("F", stage, microbatch)] = self.costs.stages[stage].saved
        if action.kind == "I":
            makes[Saved("I", stage, microbatch)] = self.costs.stages[stage].held
        return Task(action, (rank,), seconds, tuple(transfers), reads, makes, reads)  # nothing else reads them

    def transfer(self, send: Action) -> Task:
        """The transfer of a message on its channel, once it is sent and its receive is posted."""
        edge = edge_of(send)
        channel = (self.schedule.place[edge.source], self.schedule.place[edge.target])
        ends = (send, edge.receive(send.microbatch))
        return Task(Message(edge, send.microbatch), (channel,), self.costs.transfer_seconds(edge), ends)

    def _bytes(self, message: Message) -> int:
        return self.costs.message_bytes.get(message.edge, 0)
