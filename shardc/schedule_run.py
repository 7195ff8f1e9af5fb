"""When each computation of a schedule runs, if every message leaves as soon as it can: the fast simulation."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from shardc.action import Action, Edge, Schedule
from shardc.error import ShardingError
from shardc.stage_cost import Costs

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
