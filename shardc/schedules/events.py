"""Runs a schedule's computations event by event: when each ends, the makespan, and where messages are inserted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, TypeVar

from shardc.language.errors import ShardingError
from shardc.schedules.costs import Costs, costs_for
from shardc.schedules.schedule import Action, Edge, Result, Schedule, edges_from, edges_into, operands

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
