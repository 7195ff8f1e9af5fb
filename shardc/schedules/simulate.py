"""Simulates a schedule with given costs: a timeline of actions and messages, and the bytes alive on each rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import TypeVar

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.clock import Clock, Task, Tasks
from shardc.schedules.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Schedule,
    edge_of,
    edges_from,
    edges_into,
    operands,
)
from shardc.schedules.timeline import Timeline, peak_live, timeline


def simulate(schedule: Schedule, costs: Costs | StageCost | None = None) -> Timeline:
    """The timeline of a schedule; a compute-only schedule gets its messages first, each sent as soon as possible.

    A message starts once it is sent, its receive is posted and the channel is free; each ordered pair of ranks is a
    channel. The bytes that F saves live until B or I has run, those that I holds for W until W has run. A message lives
    on its source from its computation until it is sent, and on its target from its receive until it is read.
    """
    costs = costs_for(schedule.num_stages, costs)
    return timeline(tuple(_tasks(schedule, costs)), range(schedule.num_ranks), _resident(schedule, costs))


def peak_bytes(schedule: Schedule, costs: Costs | StageCost | None = None, step: Step | None = None) -> tuple[int, ...]:
    """The most bytes alive on each rank between two of its actions. ``step``: as for ``with_messages``."""
    costs = costs_for(schedule.num_stages, costs)
    if not schedule.has_messages:
        schedule = with_messages(schedule, costs, step)
    tasks, resident = _Tasks(schedule, costs), _resident(schedule, costs)
    rows = ([tasks.action(rank, action) for action in row] for rank, row in enumerate(schedule.actions))
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
    """The values that cross an edge for one microbatch: their name on both ranks, and that of their transfer."""

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
        self.schedule, self.costs, self.is_forward_only = schedule, costs, schedule.is_forward_only
        phases = ("F",) if self.is_forward_only else ("F", "B")
        edges = [edge for edge in schedule.edges if edge.phase in phases]
        self.entering, self.leaving = edges_into(edges), edges_from(edges)

    def action(self, rank: int, action: Action) -> Task:
        """The task of an action on its rank."""
        if action.kind in SENDS:
            message = Message(edge_of(action), action.microbatch)
            return Task(action, (rank,), frees=(message,))
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
        if action.kind == "F" and not self.is_forward_only:
            makes[Saved("F", stage, microbatch)] = self.costs.stages[stage].saved
        if action.kind == "I":
            makes[Saved("I", stage, microbatch)] = self.costs.stages[stage].held
        return Task(action, (rank,), seconds, tuple(transfers), makes=makes, frees=reads)  # nothing else reads them

    def transfer(self, send: Action) -> Task:
        """The task of a transfer on its channel, once the message is sent and its receive is posted."""
        edge = edge_of(send)
        channel = (self.schedule.place[edge.source], self.schedule.place[edge.target])
        ends = (send, edge.receive(send.microbatch))
        return Task(Message(edge, send.microbatch), (channel,), self.costs.transfer_seconds(edge), ends)

    def _bytes(self, message: Message) -> int:
        return self.costs.message_bytes.get(message.edge, 0)


AnySchedule = TypeVar("AnySchedule", bound=Schedule)


def with_messages(schedule: AnySchedule, costs: Costs | None = None, step: Step | None = None) -> AnySchedule:
    """The schedule with a send after each computation whose result another rank reads, and a receive on that rank.

    Receives come in the order of the sends. ``costs`` decide which computation ends first; by default all take equally
    long. Messages that the schedule has already are inserted anew; reductions stay at the end. Raises a ShardingError
    if the order of computations cannot run. ``step``: the schedule's tasks with these costs, if they exist already.
    """
    bare = schedule.compute_only()
    step = step or Step(bare, costs_for(schedule.num_stages, costs))
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    leaving = edges_from(bare.crossing())
    for action in step.by_end(bare):
        rows[schedule.place[action.stage]].append(action)
        for edge in leaving.get((action.stage, action.phase), ()) if action.makes_messages else ():
            rows[schedule.place[edge.source]].append(edge.send(action.microbatch))
            rows[schedule.place[edge.target]].append(edge.receive(action.microbatch))
    for rank, action in schedule.walk():
        rows[rank] += [action] if action.kind == "REDUCE" else []
    return replace(schedule, actions=tuple(map(tuple, rows)))


def makespan(schedule: Schedule, costs: Costs, limit: float = inf) -> float:
    """The end of a compute-only schedule in seconds; infinity as soon as it is bound to be above the limit."""
    return Step(schedule, costs).makespan(schedule, limit)


class Step:
    """The computations of a compute-only schedule and their messages as tasks, for any order of each rank.

    Messages have the lowest numbers, so that they come first among tasks that end at the same time; ``actions`` follow.
    ``numbers``: the number of each computation, by kind, stage and microbatch. ``sent``: for each task the messages of
    its result.
    """

    __slots__ = ("actions", "num_messages", "numbers", "sent", "tasks")

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.actions = [action for _, action in schedule.walk()]
        tasks = list(_message_tasks(schedule, costs))
        self.num_messages = len(tasks)
        keys = ((action.kind, action.stage, action.microbatch) for action in self.actions)
        self.numbers = {key: number for number, key in enumerate(keys, self.num_messages)}
        self.tasks = Tasks([*tasks, *_computation_tasks(schedule, costs)], f"schedule {schedule.name}")
        self.sent = [[reader for reader in readers if reader < self.num_messages] for readers in self.tasks.readers]

    def run(self, schedule: Schedule, limit: float = inf) -> Clock:
        """Run the computations in the order of a schedule, and messages in the order in which each rank makes them."""
        rows: dict[Hashable, list[int]] = {}
        for rank, row in enumerate(schedule.actions):
            rows[rank] = [self.numbers[action.kind, action.stage, action.microbatch] for action in row]
        for number in [number for row in rows.values() for number in row]:
            for message in self.sent[number]:
                rows.setdefault(self.tasks.lanes[message][0], []).append(message)
        return self.tasks.run(rows, limit)

    def by_end(self, schedule: Schedule) -> list[Action]:
        """The computations of a schedule in the order of their ends."""
        first = self.num_messages
        return [self.actions[number - first] for number in self.run(schedule).order if number >= first]

    def makespan(self, schedule: Schedule, limit: float = inf) -> float:
        """The end in seconds of computations in the order of a schedule; infinity if it is above the limit."""
        clock = self.run(schedule, limit)
        return max(clock.ends, default=0) if clock.is_done else inf


def _message_tasks(schedule: Schedule, costs: Costs) -> Iterator[Task]:
    leaving = edges_from(schedule.crossing())
    for rank, action in schedule.walk():
        for edge in leaving.get((action.stage, action.phase), ()) if action.makes_messages else ():
            channel, seconds = (rank, schedule.place[edge.target]), costs.transfer_seconds(edge)
            yield Task(Message(edge, action.microbatch), (channel,), seconds, (action,))


def _computation_tasks(schedule: Schedule, costs: Costs) -> Iterator[Task]:
    entering, crossing = edges_into(schedule.edges), set(schedule.crossing())
    makers = {(each.stage, each.phase, each.microbatch): each for _, each in schedule.walk() if each.makes_messages}
    for rank, action in schedule.walk():
        reads = operands(action, entering)
        after = (
            Message(edge, action.microbatch) if edge in crossing else makers.get(result, result)
            for result, edge in reads
        )
        yield Task(action, (rank,), costs.seconds(action), tuple(after))


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage for one microbatch.

    ``forward``, ``input``, ``weight``: seconds of the actions F, I and W; ``reduce``: of REDUCE, once a step.
    ``saved``: bytes that F saves for backward; ``held``: those of them that W still needs after I. ``resident``: bytes
    of weights, gradients and optimizer state, allocated all the time. Raises a ShardingError for a negative value.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    reduce: float = 0
    saved: int = 1
    held: int = 1
    resident: int = 0

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        wrong = [name for name, value in values.items() if not isinstance(value, (int, float)) or not value >= 0]
        problem, remedy = "it is negative, or no number", "say seconds and bytes of 0 or more"
        raise_all([ShardingError("cost of a stage", f"{name}={values[name]!r}", problem, remedy) for name in wrong])

    def seconds(self, kind: str) -> float:
        """The time of an action of this kind; B takes as long as I and W."""
        by_kind = {"F": self.forward, "I": self.input, "W": self.weight, "REDUCE": self.reduce}
        return self.input + self.weight if kind == "B" else by_kind[kind]

    def change(self, kind: str) -> int:
        """The change in bytes saved for backward: F saves them, B frees them, I frees a part and W the rest."""
        by_kind = {"F": self.saved, "I": self.held - self.saved, "W": -self.held, "B": -self.saved}
        return by_kind.get(kind, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of every stage and of messages.

    ``latency``: seconds of each message. ``bandwidth``: bytes a second. ``message_bytes``: the size of one message over
    each edge. Raises a ShardingError for a negative latency or a bandwidth of 0 or less.
    """

    stages: tuple[StageCost, ...]
    latency: float = 0
    bandwidth: float = float("inf")
    message_bytes: Mapping[Edge, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            what = f"latency={self.latency!r}, bandwidth={self.bandwidth!r}"
            raise ShardingError("cost of a message", what, "no time is negative", "say latency >= 0 and bandwidth > 0")

    def seconds(self, action: Action) -> float:
        """The time of a computation or a reduction."""
        return self.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, edge: Edge) -> float:
        """The time of one message over an edge."""
        size = self.message_bytes.get(edge, 0)
        return self.latency + size / self.bandwidth if size else self.latency


def costs_for(num_stages: int, costs: Costs | StageCost | None) -> Costs:
    """The costs of every stage. A StageCost applies to each stage; by default F, I and W take one second each.

    Raises a ShardingError for any other type, and for costs of another number of stages.
    """
    if costs is None or isinstance(costs, StageCost):
        return Costs((costs or StageCost(),) * num_stages)
    if not isinstance(costs, Costs):
        problem, remedy = "it is no shardc.Costs and no shardc.StageCost", "say StageCost(...) for all stages alike"
        raise ShardingError("costs", repr(costs), problem, remedy)
    if not all(isinstance(each, StageCost) for each in costs.stages):
        problem, remedy = "a stage's cost is a shardc.StageCost", "say Costs((StageCost(...), ...))"
        raise ShardingError("costs", repr(costs.stages), problem, remedy)
    if len(costs.stages) != num_stages:
        what = f"costs of {len(costs.stages)} stages for a schedule of {num_stages}"
        raise ShardingError("costs", what, "every stage has one", f"give {num_stages} of them")
    return costs
