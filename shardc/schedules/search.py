"""Finds the fastest schedule among all named orders and many of a list scheduler, compared with a lower bound."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from shardc.language.errors import OptionError
from shardc.schedules.clock import ROUNDING, Clock
from shardc.schedules.orders import LINEAR, ORDERS, fits, lead, looped_place, schedule_named, v_place
from shardc.schedules.schedule import Action, Edge, Schedule, edges_from, edges_into
from shardc.schedules.simulate import Costs, StageCost, Step, costs_for, peak_bytes, saved_bytes

OVERHANGS = (0.25, 0.5, 0, 1)


def fastest(
    count: int, num_ranks: int, edges: tuple[Edge, ...], costs: Costs, memory: int | None = None,
    place: tuple[int, ...] | None = None,
) -> Schedule:  # fmt: skip
    """The candidate with the shortest makespan; ties go to the lowest peak of memory, then to the first.

    Candidates are all named schedules that fit, with every cap on microbatches in flight. Unless one of them meets the
    lower bound, those of a list scheduler follow, for every place of the stages, with several caps and policies.
    ``count``: the number of microbatches. ``memory``: bytes that a rank may use. ``place``: the rank of each stage, if
    it is fixed. Raises an OptionError if no candidate fits into ``memory``.
    """
    best, num_stages = _Best(costs, memory, _Steps(costs)), len(costs.stages)
    known = set()  # the same order may have several names
    for name in (name for name in ORDERS if fits(name, num_stages, num_ranks)):
        for cap in (None, *range(1, max(2 * num_ranks, count) + 1)) if name in LINEAR else (None,):
            candidate = schedule_named(name, edges, num_stages, count, num_ranks, cap)
            if candidate.actions not in known and place in (None, candidate.place):
                known.add(candidate.actions)
                candidate = candidate if cap is None else replace(candidate, name=f"{name}, {cap} in flight")
                best.offer(best.steps.of(candidate).makespan(candidate, best.makespan), candidate)
    places = {"list": looped_place(num_stages, num_ranks)}
    if num_stages > num_ranks:
        places["list in a V"] = v_place(num_stages, num_ranks)
    for name, candidate_place in places.items():
        if place in (None, candidate_place):
            best.search(Schedule(name, ((),) * num_ranks, candidate_place, count, edges))
    if best.schedule is None:
        what = f"memory={memory}, {num_stages} stages on {num_ranks} ranks"
        problem = f"no schedule is known that needs less than {best.least} bytes on its fullest rank"
        raise OptionError("schedule auto", what, problem, f"allow {best.least} bytes, or save less in each stage")
    return best.schedule


def estimate(frame: Schedule, costs: Costs) -> float:
    """An estimate of the makespan of ``fastest`` with a frame's place: the least of named and a few listed orders."""
    ranks, best, steps = frame.num_ranks, inf, _Steps(costs)
    for name in (name for name in ORDERS if fits(name, frame.num_stages, ranks)):
        order = schedule_named(name, frame.edges, frame.num_stages, frame.num_microbatches, ranks)
        if order.place == frame.place:
            best = min(best, steps.of(order).makespan(order, best))
    saved = [sum(costs.stages[stage].saved for stage in frame.stages_on(rank)) for rank in range(ranks)]
    for cap, overhang in product((ranks, 3 * ranks // 2), (0.25, 1)):
        found = greedy(frame, steps, [cap * nbytes for nbytes in saved], Policy(True, overhang), best)
        best = best if found is None else min(best, found[0])
    return best


@dataclass(frozen=True, slots=True)
class _Steps:
    """The tasks of a step for each place of the stages, with backward whole or split; all their orders share them."""

    costs: Costs
    known: dict[tuple[tuple[int, ...], bool], Step] = field(default_factory=dict)

    def of(self, order: Schedule) -> Step:
        """The tasks of an order with all microbatches."""
        return self.of_frame(order, any(action.kind == "W" for action in order.actions[0]))

    def of_frame(self, frame: Schedule, splits: bool) -> Step:
        """The tasks that all orders of a frame share."""
        key = frame.place, splits
        if key not in self.known:
            kinds, microbatches = "FIW" if splits else "FB", range(frame.num_microbatches)
            rows = (
                [Action(*each) for each in product(kinds, frame.stages_on(rank), microbatches)]
                for rank in range(frame.num_ranks)
            )
            self.known[key] = Step(replace(frame, actions=tuple(map(tuple, rows))), self.costs)
        return self.known[key]


@dataclass(slots=True)
class _Best:
    """The best schedule so far. ``least``: the least peak of all candidates, as long as none fits into memory."""

    costs: Costs
    memory: int | None
    steps: _Steps
    schedule: Schedule | None = None
    makespan: float = inf
    peak: float = inf
    least: float = inf

    def search(self, frame: Schedule) -> None:
        """Try the list scheduler on a frame until the lower bound is met."""
        bound = lower_bound(frame, self.costs, self.memory)
        for name, caps, policy in _searches(frame, self.costs, self.memory):
            if self.makespan <= bound:
                return
            candidate = greedy(replace(frame, name=frame.name + name), self.steps, caps, policy, self.makespan)
            if candidate:
                self.offer(*candidate)

    def offer(self, makespan: float, candidate: Schedule) -> None:
        """Take the candidate if it is better and fits. Saved bytes rule most candidates out without a simulation."""
        saved = max(saved_bytes(candidate, self.costs))
        is_worse = makespan > self.makespan or (makespan == self.makespan and saved >= self.peak)
        if is_worse or (self.memory is not None and saved > self.memory and saved >= self.least):
            return
        peak = max(peak_bytes(candidate, self.costs, self.steps.of(candidate)))
        self.least = min(self.least, peak)
        has_room = self.memory is None or peak <= self.memory
        if has_room and (makespan, peak) < (self.makespan, self.peak):
            self.schedule, self.makespan, self.peak = candidate, makespan, peak


def _searches(frame: Schedule, costs: Costs, memory: int | None) -> Iterator[tuple[str, list[float], Policy]]:
    """For each run of the list scheduler its name, the bytes that each rank may save, and its policy."""
    ranks = range(frame.num_ranks)
    saved = [sum(costs.stages[stage].saved for stage in frame.stages_on(rank)) for rank in ranks]
    leads = (True, False) if frame.num_stages == frame.num_ranks else (False,)
    near = [-(-frame.num_ranks * quarters // 4) for quarters in (2, 4, 5, 6, 7, 8, 10, 12)]
    in_flight = sorted({1, frame.num_microbatches, *(cap for cap in near if cap < frame.num_microbatches)})
    for cap, (room, suffix) in product(in_flight, _rooms(frame, costs, memory)):
        caps = [min(cap * nbytes, most) for nbytes, most in zip(saved, room, strict=True)]
        ahead = tuple(1 + lead(rank, frame.num_ranks, cap) for rank in ranks)
        for has_leads, overhang in product(leads, OVERHANGS):
            name = f", {cap} in flight, W over by {overhang}" + (", shared" if has_leads else "") + suffix
            yield name, caps, Policy(True, overhang, ahead if has_leads else None)
        yield f", {cap} in flight, B{suffix}", caps, Policy(False)


def _rooms(frame: Schedule, costs: Costs, memory: int | None) -> list[tuple[list[float], str]]:
    """The bytes that each rank may save: its memory less resident bytes, or also less one message for each edge."""
    if memory is None:
        return [([inf] * frame.num_ranks, "")]
    room: list[float] = [memory] * frame.num_ranks
    for stage, rank in enumerate(frame.place):
        room[rank] -= costs.stages[stage].resident
    rest = list(room)
    for edge in frame.edges:
        for stage in (edge.source, edge.target):
            rest[frame.place[stage]] -= costs.message_bytes.get(edge, 0)
    return [(room, "")] if rest == room else [(room, ""), (rest, ", room for messages")]


def lower_bound(frame: Schedule, costs: Costs | StageCost | None = None, memory: int | None = None) -> float:
    """A lower bound in seconds for all orders with the frame's place, edges and microbatches, and ``memory`` a rank.

    A rank computes everything after the first microbatch has reached it. A stage alone on its rank computes all F and
    I, and every W that memory does not let it put off, before its last I ends. Then that microbatch goes on up to the
    first stage, whose W comes last.
    """
    costs = costs_for(frame.num_stages, costs)
    leaving, entering, count = edges_from(frame.edges), edges_into(frame.edges), frame.num_microbatches
    heads = [0.0] * frame.num_stages  # when the first microbatch reaches each stage
    tails = [
        cost.weight for cost in costs.stages
    ]  # from a stage's last I to the end: its W, or earlier stages' backward
    for stage in range(frame.num_stages):  # edges of forward go to later stages, edges of backward to earlier ones
        for edge in entering.get((stage, "F"), ()):
            end = heads[edge.source] + costs.stages[edge.source].forward
            heads[stage] = max(heads[stage], end + _transfer(frame, costs, edge))
        for edge in leaving.get((stage, "B"), ()):
            after = costs.stages[edge.target].input + tails[edge.target]
            tails[stage] = max(tails[stage], _transfer(frame, costs, edge) + after)
    bounds = []
    for rank in range(frame.num_ranks):
        stages = frame.stages_on(rank)
        head = min(heads[stage] for stage in stages)
        own = [costs.stages[stage] for stage in stages]
        bounds.append(head + count * sum(cost.forward + cost.input + cost.weight for cost in own))
        if len(stages) == 1:
            (cost,) = own
            room = count if memory is None or not cost.held else (memory - cost.resident) // cost.held
            early = max(0, count - room) * cost.weight
            bounds.append(head + count * (cost.forward + cost.input) + early + tails[stages[0]])
    return max(bounds)


def _transfer(frame: Schedule, costs: Costs, edge: Edge) -> float:
    return costs.transfer_seconds(edge) if frame.is_crossing(edge) else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule by which a rank chooses its next computation.

    First comes backward, as I and W if it ``splits``. Then F under the cap, of the stage furthest down the model. Then
    a W that was put off, if at most the fraction ``overhang`` of it is left when the next known message arrives.
    ``ahead``: for each rank the number of microbatches that may be between F and I in each of its stages.
    """

    splits: bool = True
    overhang: float = 0.5
    ahead: tuple[int, ...] | None = None


def greedy(
    frame: Schedule, steps: _Steps, caps: Sequence[float], policy: Policy, limit: float = inf
) -> tuple[float, Schedule] | None:
    """List scheduling: a makespan in seconds and its schedule, with the place, edges and microbatches of ``frame``.

    No rank saves more bytes than its cap. None if ranks get stuck under their caps, or if it takes longer than
    ``limit``.
    """
    state = _State(frame, steps.of_frame(frame, policy.splits), steps.costs, caps, policy)
    state.run(limit)
    if not state.clock.is_done:
        return None
    return max(state.clock.ends), replace(frame, actions=tuple(map(tuple, state.rows)))


class _State:
    """The progress of every rank.

    ``following``: the next microbatch of each stage and phase. ``put_off``: the W that each rank has put off.
    ``latest``: each rank's last end if it never idles again. ``events``: the times at which a rank becomes free or an
    operand arrives. Ranks choose in order of time, so that all earlier arrivals are known.
    """

    def __init__(self, frame: Schedule, step: Step, costs: Costs, caps: Sequence[float], policy: Policy) -> None:
        self.frame, self.costs, self.caps, self.policy = frame, costs, caps, policy
        self.step, self.clock = step, Clock(step.tasks)
        ranks = range(frame.num_ranks)
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.put_off: list[deque[Action]] = [deque() for _ in ranks]
        self.live, self.latest = [0 for _ in ranks], [0.0 for _ in ranks]
        self.clock.free = dict.fromkeys(ranks, 0)
        self.events = [(0.0, rank) for rank in ranks]
        self.order: list[list[tuple[int, str, str]]] = []
        backward = "I" if policy.splits else "B"
        for rank in ranks:  # the work of its stages, most urgent first
            stages = frame.stages_on(rank)
            urgent = [(stage, "B", backward) for stage in stages]
            self.order.append([*urgent, *((stage, "F", "F") for stage in reversed(stages))])
        for cost, rank in zip(costs.stages, frame.place, strict=True):
            self.latest[rank] += (cost.forward + cost.seconds("B")) * frame.num_microbatches
        self.following = {(stage, phase): 0 for stages in self.order for stage, phase, _ in stages}

    def run(self, limit: float) -> None:
        """Run to the end, or until no rank can go on, or until one must end after the limit."""
        free = self.clock.free
        while self.events:
            now, rank = heapq.heappop(self.events)
            action = self._choice(rank, now) if now >= free[rank] else None
            if action is not None:
                self.latest[rank] += now - free[rank]
                if self.latest[rank] > limit * (1 + ROUNDING):
                    return
                self._start(rank, action, now)

    def _choice(self, rank: int, now: float) -> Action | None:
        """The rank's most urgent work that is ready; else a W, if it has time for one or must free memory."""
        next_arrival, is_blocked = inf, False
        for stage, phase, kind in self.order[rank]:
            microbatch = self.following[stage, phase]
            in_flight = microbatch - self.following[stage, "B"]
            if phase == "F" and self.policy.ahead is not None and in_flight >= self.policy.ahead[rank]:
                continue
            ready = self._ready(kind, stage, microbatch)
            if ready <= now and (phase == "B" or self._has_room(rank, stage)):
                return Action(kind, stage, microbatch)
            is_blocked |= ready <= now
            next_arrival = min(next_arrival, ready if ready > now else inf)
        if not self.put_off[rank]:
            return None
        first = self.put_off[rank][0]
        fits = now + self.costs.seconds(first) * (1 - self.policy.overhang) <= next_arrival
        return self.put_off[rank].popleft() if fits or is_blocked else None

    def _ready(self, kind: str, stage: int, microbatch: int) -> float:
        """The time at which the last operand arrives; infinity if that is not known yet."""
        number = self.step.numbers.get((kind, stage, microbatch))
        return inf if number is None or self.clock.missing[number] else self.clock.arrived[number]

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether F can save its bytes and leave room for a later stage of the rank, which must end first."""
        later = [s for s in self.frame.stages_on(rank) if s > stage]
        reserve = max((self.costs.stages[s].saved for s in later), default=0)
        return self.live[rank] + self.costs.stages[stage].saved + reserve <= self.caps[rank]

    def _start(self, rank: int, action: Action, now: float) -> None:
        self.rows[rank].append(action)
        self.live[rank] += self.costs.stages[action.stage].change(action.kind)
        ready = self.clock.start(self.step.numbers[action.kind, action.stage, action.microbatch], now)
        heapq.heappush(self.events, (self.clock.free[rank], rank))
        if action.kind != "W":
            self.following[action.stage, action.phase] += 1
        if action.kind == "I":
            self.put_off[rank].append(Action("W", action.stage, action.microbatch))
        num_messages, place = self.step.num_messages, self.frame.place
        for number in ready:
            for work in self.clock.start(number) if number < num_messages else (number,):
                target = place[self.step.actions[work - num_messages].stage]
                heapq.heappush(self.events, (self.clock.arrived[work], target))
