"""A list scheduler: every rank always runs the best computation it can, under a cap on the bytes that it saves."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from shardc.schedules.costs import Costs
from shardc.schedules.events import ROUNDING, Channels
from shardc.schedules.schedule import Action, Schedule, edges_from


@dataclass(frozen=True, slots=True)
class Policy:
    """How a rank chooses its next computation.

    First comes backward, as I and W if it ``splits``. Then F under the cap, of the stage furthest down the model. Then
    a W that was put off, if at most the part ``overhang`` of it is left when the next known message arrives. ``ahead``:
    the microbatches of each stage of a rank that may be between F and I.
    """

    splits: bool = True
    overhang: float = 0.5
    ahead: tuple[int, ...] | None = None


def greedy(
    frame: Schedule, costs: Costs, caps: Sequence[float], policy: Policy, limit: float = inf
) -> tuple[float, Schedule] | None:
    """A makespan in seconds and its schedule, with the place, edges and microbatches of ``frame``.

    No rank saves more than its cap. None if ranks get stuck under their caps, or if it takes longer than ``limit``.
    """
    state = _State(frame, costs, caps, policy)
    state.run(limit)
    num_actions = frame.num_stages * frame.num_microbatches * (3 if policy.splits else 2)
    if sum(map(len, state.rows)) < num_actions:
        return None
    return max(state.free), replace(frame, actions=tuple(map(tuple, state.rows)))


Work = tuple[int, str, int]  # a stage, its phase F or B, and a microbatch


class _State:
    """The progress of every rank.

    ``missing``: for work of which some operands have arrived, the number of the others, and the last arrival;
    ``ready``: when the last operand arrives. ``following``: the next microbatch of each stage and phase. ``put_off``:
    the W that are left to do. ``latest``: each rank's last end if it does not idle any more. ``events``: the times at
    which a rank becomes free or an operand arrives. Ranks choose in order of time, so that all earlier arrivals are
    known.
    """

    def __init__(self, frame: Schedule, costs: Costs, caps: Sequence[float], policy: Policy) -> None:
        self.frame, self.costs, self.caps, self.policy = frame, costs, caps, policy
        ranks = range(frame.num_ranks)
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.put_off: list[deque[Action]] = [deque() for _ in ranks]
        self.live, self.free, self.latest = [0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.channels = Channels(frame, costs)
        self.events = [(0.0, rank) for rank in ranks]
        self.order: list[list[tuple[int, str]]] = []
        for rank in ranks:  # the work of its stages, most urgent first
            stages = frame.stages_on(rank)
            self.order.append([*((stage, "B") for stage in stages), *((stage, "F") for stage in reversed(stages))])
        for cost, rank in zip(costs.stages, frame.place, strict=True):
            self.latest[rank] += (cost.forward + cost.seconds("B")) * frame.num_microbatches
        self.following = {key: 0 for keys in self.order for key in keys}
        self.missing: dict[Work, tuple[int, float]] = {}
        self.ready: dict[Work, float] = {}
        self.leaving = edges_from(frame.edges)
        self.entering = Counter[tuple[int, str]]((edge.target, edge.phase) for edge in frame.edges)
        for stage in range(frame.num_stages):
            self.entering[stage, "B"] += 1  # its own F
            if not self.entering[stage, "F"]:
                self.ready |= {(stage, "F", i): 0.0 for i in range(frame.num_microbatches)}

    def run(self, limit: float) -> None:
        """Run to the end, or until no rank can go on, or until one must end after the limit."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            action = self._choice(rank, now) if now >= self.free[rank] else None
            if action is not None:
                self.latest[rank] += now - self.free[rank]
                if self.latest[rank] > limit * (1 + ROUNDING):
                    return
                self._start(rank, action, now)

    def _choice(self, rank: int, now: float) -> Action | None:
        """The rank's most urgent work that is ready; else a W, if it has time for one or must free memory."""
        next_arrival, is_blocked = inf, False
        for stage, phase in self.order[rank]:
            microbatch = self.following[stage, phase]
            in_flight = microbatch - self.following[stage, "B"]
            if phase == "F" and self.policy.ahead is not None and in_flight >= self.policy.ahead[rank]:
                continue
            ready = self.ready.get((stage, phase, microbatch), inf)
            if ready <= now and (phase == "B" or self._has_room(rank, stage)):
                kind = phase if phase == "F" or not self.policy.splits else "I"
                return Action(kind, stage, microbatch)
            is_blocked |= ready <= now
            next_arrival = min(next_arrival, ready if ready > now else inf)
        if not self.put_off[rank]:
            return None
        first = self.put_off[rank][0]
        fits = now + self.costs.seconds(first) * (1 - self.policy.overhang) <= next_arrival
        return self.put_off[rank].popleft() if fits or is_blocked else None

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether F can save its bytes and leave room for a later stage of the rank, which must end first."""
        later = [s for s in self.frame.stages_on(rank) if s > stage]
        reserve = max((self.costs.stages[s].saved for s in later), default=0)
        return self.live[rank] + self.costs.stages[stage].saved + reserve <= self.caps[rank]

    def _start(self, rank: int, action: Action, now: float) -> None:
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
            self.put_off[rank].append(Action("W", action.stage, action.microbatch))
        if action.kind == "F":
            self._arrive((action.stage, "B", action.microbatch), end)
        for edge in self.leaving.get((action.stage, action.phase), ()):
            self._arrive((edge.target, edge.phase, action.microbatch), self.channels.arrival(edge, end))

    def _arrive(self, work: Work, time: float) -> None:
        """Note the arrival of one operand; with the last one the work is ready."""
        missing, latest = self.missing.pop(work, (self.entering[work[:2]], 0.0))
        latest = max(time, latest)
        if missing > 1:
            self.missing[work] = missing - 1, latest
        else:
            self.ready[work] = latest
            heapq.heappush(self.events, (latest, self.frame.place[work[0]]))
