"""When everything in a schedule happens, and how many bytes of it live: its actions and messages as tasks on lanes."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.schedule import RECEIVES, SENDS, Action, Edge, Schedule, edge_of
from shardc.schedules.timeline import Task, Timeline, peak_live, timeline


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


ROUNDING = 1e-9  # of sums of seconds in another order


def edges_from(edges: Sequence[Edge]) -> dict[tuple[int, str], list[Edge]]:
    """Those that leave each stage in each phase."""
    leaving: dict[tuple[int, str], list[Edge]] = {}
    for edge in edges:
        leaving.setdefault((edge.source, edge.phase), []).append(edge)
    return leaving


def edges_into(edges: Sequence[Edge]) -> dict[tuple[int, str], list[Edge]]:
    """Those that enter each stage in each phase."""
    entering: dict[tuple[int, str], list[Edge]] = {}
    for edge in edges:
        entering.setdefault((edge.target, edge.phase), []).append(edge)
    return entering


def makespan(schedule: Schedule, costs: Costs, limit: float = inf) -> float:
    """When the last computation ends, or infinity once a rank has idled so long that it is above the limit."""
    left = [sum(map(costs.seconds, row)) for row in schedule.actions]
    latest: float = 0
    for rank, _, start, end in run(schedule, costs):
        left[rank] -= end - start
        if end + left[rank] > limit * (1 + ROUNDING):
            return inf
        latest = max(latest, end)
    return latest


Step = tuple[int, Action, float, float]  # rank, action, start and end in seconds


def run(schedule: Schedule, costs: Costs) -> Iterator[Step]:
    """Every computation when it runs, by its end; a ShardingError where some rank waits for ever.

    Each rank computes in its own order; a message leaves once it is made and the channel is free.
    """
    state = _State(schedule, costs)
    for rank in range(schedule.num_ranks):
        state.offer(rank)
    while state.offered:
        yield state.finish(*heapq.heappop(state.offered))
    stuck = [
        (rank, row[at]) for rank, (row, at) in enumerate(zip(schedule.actions, state.at, strict=True)) if at < len(row)
    ]
    if stuck:
        what = "; ".join(f"rank {rank} waits before {action}" for rank, action in stuck)
        remedy = "call check() on the schedule: it names the circle or what is missing"
        raise ShardingError(f"schedule {schedule.name}", what, "no rank can go on", remedy)


@dataclass(slots=True)
class _State:
    """How far each rank is (``at``), what has arrived at which stage, when, and when each rank and channel is free.

    A computation is offered, with its start and end, once all that it reads has arrived; ``waiting`` are ranks that
    wait for a (stage, phase, microbatch) to be made.
    """

    schedule: Schedule
    costs: Costs
    at: list[int] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    channel: dict[tuple[int, int], float] = field(default_factory=dict)
    made: dict[tuple[int, str, int], float] = field(default_factory=dict)
    arrived: dict[tuple[Edge, int], float] = field(default_factory=dict)
    offered: list[tuple[float, int, float]] = field(default_factory=list)
    waiting: dict[tuple[int, str, int], list[int]] = field(default_factory=dict)
    entering: dict[tuple[int, str], list[Edge]] = field(default_factory=dict)
    leaving: dict[tuple[int, str], list[Edge]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = [0] * self.schedule.num_ranks
        self.free = [0] * self.schedule.num_ranks
        self.leaving = edges_from(self.schedule.edges)
        self.entering = edges_into(self.schedule.edges)

    def offer(self, rank: int) -> None:
        """Offer the rank's next computation, or note what it waits for."""
        if self.at[rank] == len(self.schedule.actions[rank]):
            return
        action = self.schedule.actions[rank][self.at[rank]]
        start = self.free[rank]
        for key, edge in self._reads(action):
            if key not in self.made:
                self.waiting.setdefault(key, []).append(rank)
                return
            start = max(start, self.made[key] if edge is None else self.arrived[edge, action.microbatch])
        heapq.heappush(self.offered, (start + self.costs.seconds(action), rank, start))

    def _reads(self, action: Action) -> Iterator[tuple[tuple[int, str, int], Edge | None]]:
        if action.kind == "W":
            yield (action.stage, "I", action.microbatch), None
            return
        for edge in self.entering.get((action.stage, action.phase), ()):
            yield (edge.source, edge.phase, action.microbatch), edge
        if action.phase == "B":
            yield (action.stage, "F", action.microbatch), None

    def finish(self, end: float, rank: int, start: float) -> Step:
        """Send what was made and offer what has waited for it."""
        action = self.schedule.actions[rank][self.at[rank]]
        self.at[rank], self.free[rank] = self.at[rank] + 1, end
        keys: list[tuple[int, str, int]] = (
            [(action.stage, action.phase, action.microbatch)] if action.makes_messages else []
        )
        keys += [(action.stage, "I", action.microbatch)] if action.kind == "I" else []
        for edge in self.leaving.get((action.stage, action.phase), ()) if keys else ():
            self.arrived[edge, action.microbatch] = self._arrival(edge, end)
        for key in keys:
            self.made[key] = end
        for other in [rank, *(other for key in keys for other in self.waiting.pop(key, ()))]:
            self.offer(other)
        return rank, action, start, end

    def _arrival(self, edge: Edge, end: float) -> float:
        source, target = self.schedule.place[edge.source], self.schedule.place[edge.target]
        if source == target:
            return end
        self.channel[source, target] = max(end, self.channel.get((source, target), 0)) + self.costs.transfer_seconds(
            edge
        )
        return self.channel[source, target]


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, one microbatch: seconds of ``forward``, ``input`` and ``weight`` gradients; ``reduce`` once a step.

    F saves ``saved`` bytes for backward; after I what W still reads of them is ``held``. ``resident`` bytes lie there
    all the time: weights, gradients and optimizer state.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    reduce: float = 0
    saved: int = 1
    held: int = 1
    resident: int = 0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__}
        remedy = "say seconds and bytes of 0 or more"
        wrong = [name for name, value in given.items() if not isinstance(value, (int, float)) or not value >= 0]
        raise_all([_no_cost(f"{name}={given[name]!r}", remedy) for name in wrong])

    def seconds(self, kind: str) -> float:
        """Of an action; a B does I and W."""
        by_kind = {"F": self.forward, "I": self.input, "W": self.weight, "REDUCE": self.reduce}
        return self.input + self.weight if kind == "B" else by_kind[kind]

    def change(self, kind: str) -> int:
        """Of the bytes kept for backward by an action: F saves them, B frees them, I some of them and W the rest."""
        by_kind = {"F": self.saved, "I": self.held - self.saved, "W": -self.held, "B": -self.saved}
        return by_kind.get(kind, 0)


def _no_cost(what: str, remedy: str) -> ShardingError:
    return ShardingError("cost of a stage", what, "it is negative, or no number", remedy)


@dataclass(frozen=True, slots=True)
class Costs:
    """Every stage's cost, and what a message takes: ``latency`` seconds and its ``bytes`` at ``bandwidth`` a second."""

    stages: tuple[StageCost, ...]
    latency: float = 0
    bandwidth: float = float("inf")
    message_bytes: Mapping[Edge, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            what = f"latency={self.latency!r}, bandwidth={self.bandwidth!r}"
            raise ShardingError("cost of a message", what, "no time is negative", "say latency >= 0 and bandwidth > 0")

    def seconds(self, action: Action) -> float:
        """How long a computation or a reduction takes."""
        return self.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, edge: Edge) -> float:
        """How long one message is on its way."""
        size = self.message_bytes.get(edge, 0)
        return self.latency + size / self.bandwidth if size else self.latency


def costs_for(num_stages: int, costs: Costs | StageCost | None) -> Costs:
    """Costs of every stage; one StageCost is that of each, and nothing means a second for each of F, I and W."""
    if isinstance(costs, Costs) and not all(isinstance(each, StageCost) for each in costs.stages):
        problem, remedy = "a stage's cost is a shardc.StageCost", "say Costs((StageCost(...), ...))"
        raise ShardingError("costs", repr(costs.stages), problem, remedy)
    if isinstance(costs, Costs):
        if len(costs.stages) != num_stages:
            what = f"costs of {len(costs.stages)} stages for a schedule of {num_stages}"
            raise ShardingError("costs", what, "every stage has one", f"give {num_stages} of them")
        return costs
    if costs is not None and not isinstance(costs, StageCost):
        problem, remedy = "it is no shardc.Costs and no shardc.StageCost", "say StageCost(...) for all stages alike"
        raise ShardingError("costs", repr(costs), problem, remedy)
    return Costs((costs or StageCost(),) * num_stages)


def with_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The same computation with its messages; what messages it had are written anew, reductions stay at the end."""
    bare = schedule.compute_only()
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    leaving = edges_from(bare.crossing())
    for rank, action, _, _ in run(bare, costs_for(schedule.num_stages, costs)):
        rows[rank].append(action)
        for edge in leaving.get((action.stage, action.phase), ()) if action.makes_messages else ():
            rows[rank].append(edge.send(action.microbatch))
            rows[schedule.place[edge.target]].append(edge.receive(action.microbatch))
    for rank, action in schedule.walk():
        rows[rank] += [action] if action.kind == "REDUCE" else []
    return replace(schedule, actions=tuple(map(tuple, rows)))
