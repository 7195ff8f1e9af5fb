"""A list scheduler: every rank does at once the best of what it can do, under a cap on the bytes that it saves."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from shardc.action import Action, Edge, Schedule
from shardc.schedule_run import ROUNDING, edges_from
from shardc.stage_cost import Costs


@dataclass(frozen=True, slots=True)
class Policy:
    """How a rank chooses.

    Backward comes first, in two where it ``splits`` into I and W; then F under the cap, of several stages the one
    furthest down the model; then a W that is owed, where it ends, but for the part ``overhang``, before the next
    message known to come. ``ahead`` is how many microbatches each rank's stages may have begun and not brought back,
    the W that it owes not counted.
    """

    splits: bool = True
    overhang: float = 0.5
    ahead: tuple[int, ...] | None = None


def greedy(
    frame: Schedule, costs: Costs, caps: Sequence[float], policy: Policy, limit: float = inf
) -> tuple[float, Schedule] | None:
    """A makespan and its schedule, with the frame's place, edges and microbatches; no rank saves more than its cap.

    Nothing where the caps leave ranks that can do nothing more, and where it takes longer than ``limit`` seconds.
    """
    search = _Search(frame, costs, caps, policy)
    search.run(limit)
    wanted = frame.num_stages * frame.num_microbatches * (3 if policy.splits else 2)
    if sum(map(len, search.rows)) < wanted:
        return None
    return max(search.free), replace(frame, actions=tuple(map(tuple, search.rows)))


Key = tuple[int, str, int]  # a stage's F or its backward (B), of a microbatch


@dataclass(slots=True)
class _Search:
    """What has run so far.

    ``missing`` counts what a computation still waits for, where some of it has come, and when; ``ready`` is when the
    last of it arrives. ``following`` is the next microbatch of each stage and phase, ``owed`` the W to do. A rank is
    looked at whenever it is free or something arrives, all in order of time, so that whatever came before is known.
    """

    frame: Schedule
    costs: Costs
    caps: Sequence[float]
    policy: Policy
    rows: list[list[Action]] = field(init=False)
    following: dict[tuple[int, str], int] = field(init=False)
    missing: dict[Key, tuple[int, float]] = field(default_factory=dict)
    ready: dict[Key, float] = field(default_factory=dict)
    owed: list[deque[Action]] = field(init=False)
    live: list[int] = field(init=False)
    free: list[float] = field(init=False)
    latest: list[float] = field(init=False)  # each rank's last end, if it does not idle any more
    channel: dict[tuple[int, int], float] = field(default_factory=dict)
    events: list[tuple[float, int]] = field(init=False)
    order: list[list[tuple[int, str]]] = field(init=False)
    entering: Counter[tuple[int, str]] = field(init=False)
    leaving: dict[tuple[int, str], list[Edge]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(self.frame.num_ranks)
        self.rows, self.owed = [[] for _ in ranks], [deque() for _ in ranks]
        self.live, self.free = [0 for _ in ranks], [0.0 for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]
        self.order = [self._priorities(rank) for rank in ranks]
        work = [cost.forward + cost.seconds("B") for cost in self.costs.stages]
        self.latest = [0.0 for _ in ranks]
        for stage, rank in enumerate(self.frame.place):
            self.latest[rank] += work[stage] * self.frame.num_microbatches
        self.following = {key: 0 for keys in self.order for key in keys}
        self.leaving = edges_from(self.frame.edges)
        self.entering = Counter((edge.target, edge.phase) for edge in self.frame.edges)
        for stage in range(self.frame.num_stages):
            self.entering[stage, "B"] += 1  # its own F
            if not self.entering[stage, "F"]:
                self.ready |= {(stage, "F", i): 0.0 for i in range(self.frame.num_microbatches)}

    def _priorities(self, rank: int) -> list[tuple[int, str]]:
        """What the rank prefers to do, best first."""
        stages = self.frame.stages_on(rank)
        return [*((stage, "B") for stage in stages), *((stage, "F") for stage in reversed(stages))]

    def run(self, limit: float) -> None:
        """To the end, or until no rank can go on or one has idled so long that the limit cannot be met."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            action = self._choice(rank, now) if now >= self.free[rank] else None
            if action is not None:
                self.latest[rank] += now - self.free[rank]
                if self.latest[rank] > limit * (1 + ROUNDING):
                    return
                self._do(rank, action, now)

    def _choice(self, rank: int, now: float) -> Action | None:
        """The first of its preferences that it can do now; a W while nothing comes, or where memory waits for it."""
        coming, is_blocked = inf, False
        for stage, phase in self.order[rank]:
            if phase == "F" and self._is_ahead(rank, stage):
                continue
            microbatch = self.following[stage, phase]
            ready = self.ready.get((stage, phase, microbatch), inf)
            if ready <= now and (phase == "B" or self._has_room(rank, stage)):
                kind = phase if phase == "F" or not self.policy.splits else "I"
                return Action(kind, stage, microbatch)
            is_blocked |= ready <= now
            coming = min(coming, ready if ready > now else inf)
        if not self.owed[rank]:
            return None
        first = self.owed[rank][0]
        fits = now + self.costs.seconds(first) * (1 - self.policy.overhang) <= coming
        return self.owed[rank].popleft() if fits or is_blocked else None

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether F can save its bytes and leave room for a later stage of the rank, which must end before it does."""
        later = [s for s in self.frame.stages_on(rank) if s > stage]
        reserve = max((self.costs.stages[s].saved for s in later), default=0)
        return self.live[rank] + self.costs.stages[stage].saved + reserve <= self.caps[rank]

    def _is_ahead(self, rank: int, stage: int) -> bool:
        begun = self.following[stage, "F"] - self.following[stage, "B"]
        return self.policy.ahead is not None and begun >= self.policy.ahead[rank]

    def _do(self, rank: int, action: Action, now: float) -> None:
        end = now + self.costs.seconds(action)
        cost = self.costs.stages[action.stage]
        self.rows[rank].append(action)
        self.free[rank] = end
        self.live[rank] += cost.change(action.kind)
        heapq.heappush(self.events, (end, rank))
        if action.kind == "W":
            return
        self.following[action.stage, action.phase] += 1
        if action.kind == "I":
            self.owed[rank].append(Action("W", action.stage, action.microbatch))
        if action.kind == "F":
            self._arrive((action.stage, "B", action.microbatch), end)
        for edge in self.leaving.get((action.stage, action.phase), ()):
            self._arrive((edge.target, edge.phase, action.microbatch), self._sent(edge, end))

    def _sent(self, edge: Edge, end: float) -> float:
        """When a message arrives."""
        channel = self.frame.place[edge.source], self.frame.place[edge.target]
        if channel[0] == channel[1]:
            return end
        self.channel[channel] = max(end, self.channel.get(channel, 0.0)) + self.costs.transfer_seconds(edge)
        return self.channel[channel]

    def _arrive(self, key: Key, at: float) -> None:
        """Of what a computation waits for, one has come; with the last of it the computation is ready."""
        left, latest = self.missing.pop(key, (self.entering[key[:2]], 0.0))
        left, latest = left - 1, max(at, latest)
        if left:
            self.missing[key] = left, latest
        else:
            self.ready[key] = latest
            heapq.heappush(self.events, (latest, self.frame.place[key[0]]))
