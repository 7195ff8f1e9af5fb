"""Simulates a schedule with given costs: a timeline of actions and messages, and the bytes alive on each rank."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple, TypeVar

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Result,
    Schedule,
    edge_of,
    edges_from,
    edges_into,
    operands,
)
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


ROUNDING = 1e-9  # relative error of sums of seconds that are added in another order
AnySchedule = TypeVar("AnySchedule", bound=Schedule)


class Computation(NamedTuple):
    """When a rank runs an action, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


def with_messages(schedule: AnySchedule, costs: Costs | None = None) -> AnySchedule:
    """The schedule with a send after each computation whose result another rank reads, and a receive on that rank.

    Receives come in the order of the sends. ``costs`` decide which computation ends first; by default all take equally
    long. Messages that the schedule has already are inserted anew; reductions stay at the end. Raises a ShardingError
    if the order of computations cannot run.
    """
    bare = schedule.compute_only()
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    leaving = edges_from(bare.crossing())
    for rank, action, _, _ in computations(bare, costs_for(schedule.num_stages, costs)):
        rows[rank].append(action)
        for edge in leaving.get((action.stage, action.phase), ()) if action.makes_messages else ():
            rows[rank].append(edge.send(action.microbatch))
            rows[schedule.place[edge.target]].append(edge.receive(action.microbatch))
    for rank, action in schedule.walk():
        rows[rank] += [action] if action.kind == "REDUCE" else []
    return replace(schedule, actions=tuple(map(tuple, rows)))


def makespan(schedule: Schedule, costs: Costs, limit: float = inf) -> float:
    """The end of the last computation in seconds; infinity as soon as it must be above the limit."""
    remaining = [sum(map(costs.seconds, row)) for row in schedule.actions]
    latest: float = 0
    for rank, _, start, end in computations(schedule, costs):
        remaining[rank] -= end - start
        if end + remaining[rank] > limit * (1 + ROUNDING):
            return inf
        latest = max(latest, end)
    return latest


def computations(schedule: Schedule, costs: Costs) -> Iterator[Computation]:
    """Every computation of a compute-only schedule, by its end.

    Each rank computes in its own order. A message leaves once its value is computed and the channel is free. Raises a
    ShardingError if ranks wait for ever.
    """
    state = _State(schedule, costs)
    for rank in range(schedule.num_ranks):
        state.enqueue(rank)
    while state.queue:
        yield state.finish(*heapq.heappop(state.queue))
    stuck = [(r, row[at]) for r, (row, at) in enumerate(zip(schedule.actions, state.at, strict=True)) if at < len(row)]
    if stuck:
        what = "; ".join(f"rank {rank} waits before {action}" for rank, action in stuck)
        remedy = "call check() on the schedule: it names the circle or what is missing"
        raise ShardingError(f"schedule {schedule.name}", what, "no rank can go on", remedy)


@dataclass(slots=True)
class Channels:
    """When each channel, an ordered pair of ranks, is free: messages of a channel follow each other."""

    schedule: Schedule
    costs: Costs
    free: dict[tuple[int, int], float] = field(default_factory=dict)

    def arrival(self, edge: Edge, end: float) -> float:
        """When a result that is computed at ``end`` reaches the target of an edge; occupies the channel till then."""
        if not self.schedule.is_crossing(edge):
            return end
        channel = self.schedule.place[edge.source], self.schedule.place[edge.target]
        self.free[channel] = max(end, self.free.get(channel, 0)) + self.costs.transfer_seconds(edge)
        return self.free[channel]


class _State:
    """The progress of every rank.

    ``at``: the number of actions that each rank has finished. ``free``: when each rank is idle next. ``ends``: when
    each result was computed; ``arrivals``: when it reached the target of an edge. ``queue``: computations whose inputs
    have arrived, as (end, rank, start); ``waiting``: the ranks that need a result.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.at, self.free = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
        self.channels = Channels(schedule, costs)
        self.ends: dict[Result, float] = {}
        self.arrivals: dict[tuple[Edge, int], float] = {}
        self.queue: list[tuple[float, int, float]] = []
        self.waiting: dict[Result, list[int]] = {}
        self.leaving, self.entering = edges_from(schedule.edges), edges_into(schedule.edges)

    def enqueue(self, rank: int) -> None:
        """Enqueue the rank's next computation, or note which result it waits for."""
        if self.at[rank] == len(self.schedule.actions[rank]):
            return
        action = self.schedule.actions[rank][self.at[rank]]
        start = self.free[rank]
        for result, edge in operands(action, self.entering):
            if result not in self.ends:
                self.waiting.setdefault(result, []).append(rank)
                return
            start = max(start, self.ends[result] if edge is None else self.arrivals[edge, action.microbatch])
        heapq.heappush(self.queue, (start + self.costs.seconds(action), rank, start))

    def finish(self, end: float, rank: int, start: float) -> Computation:
        """Send the results of the rank's current computation and enqueue those that have waited for them."""
        action = self.schedule.actions[rank][self.at[rank]]
        self.at[rank], self.free[rank] = self.at[rank] + 1, end
        ready = [rank]
        if action.makes_messages:
            for edge in self.leaving.get((action.stage, action.phase), ()):
                self.arrivals[edge, action.microbatch] = self.channels.arrival(edge, end)
            result = action.stage, action.phase, action.microbatch
            self.ends[result] = end
            ready += self.waiting.pop(result, ())
        for other in ready:
            self.enqueue(other)
        return Computation(rank, action, start, end)


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
    """The costs of every stage. A StageCost counts for each stage; by default F, I and W take one second each.

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
