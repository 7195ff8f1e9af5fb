"""A list scheduler: every rank does at once the best of what it can do, under a cap on the bytes that it saves."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from shardc.language.errors import OptionError
from shardc.schedules.orders import LINEAR, ORDERS, fits, looped_place, named, share, v_place
from shardc.schedules.schedule import Action, Edge, Schedule
from shardc.schedules.simulate import (
    ROUNDING,
    Costs,
    StageCost,
    costs_for,
    edges_from,
    edges_into,
    makespan,
    peak_bytes,
    saved_bytes,
)


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


OVERHANGS = (0.25, 0.5, 0, 1)


def fastest(
    count: int, num_ranks: int, edges: tuple[Edge, ...], costs: Costs, memory: int | None = None,
    place: tuple[int, ...] | None = None,
) -> Schedule:  # fmt: skip
    """The candidate of the shortest makespan, of those the one of the lowest peak, of those the first.

    Candidates are all named schedules that fit, with every cap on microbatches in flight, and, where these are not
    proven to be the fastest, those of a list scheduler for every place of the stages, with several caps and policies.
    No rank needs more than ``memory`` bytes; an OptionError where that is less than any candidate can do. ``place``:
    of each stage the rank, where that is settled.
    """
    best, num_stages = _Best(costs, memory), len(costs.stages)
    for candidate in _named(num_stages, count, num_ranks, edges):
        if place in (None, candidate.place):
            best.offer(makespan(candidate, costs, best.makespan), candidate)
    for frame in _frames(num_stages, count, num_ranks, edges):
        if place not in (None, frame.place):
            continue
        bound = lower_bound(frame, costs, memory)
        for name, caps, policy in _searches(frame, costs, memory):
            if best.makespan <= bound:
                break
            found = greedy(replace(frame, name=frame.name + name), costs, caps, policy, best.makespan)
            if found:
                best.offer(*found)
    if best.schedule is None:
        what = f"memory={memory}, {num_stages} stages on {num_ranks} ranks"
        problem = f"no schedule is known that needs less than {best.least} bytes on its fullest rank"
        raise OptionError("schedule auto", what, problem, f"allow {best.least} bytes, or save less in each stage")
    return best.schedule


@dataclass(slots=True)
class _Best:
    """The best schedule so far, and the ``least`` memory that any needs, while none fits."""

    costs: Costs
    memory: int | None
    schedule: Schedule | None = None
    makespan: float = inf
    peak: float = inf
    least: float = inf

    def offer(self, makespan: float, candidate: Schedule) -> None:
        """Take it if it is better and fits; what it saves alone says of most that they are not or do not."""
        saved = max(saved_bytes(candidate, self.costs))
        is_worse = makespan > self.makespan or (makespan == self.makespan and saved >= self.peak)
        if is_worse or (self.memory is not None and saved > self.memory and saved >= self.least):
            return
        peak = max(peak_bytes(candidate, self.costs))
        self.least = min(self.least, peak)
        fits = self.memory is None or peak <= self.memory
        if fits and (makespan, peak) < (self.makespan, self.peak):
            self.schedule, self.makespan, self.peak = candidate, makespan, peak


def _named(num_stages: int, count: int, num_ranks: int, edges: tuple[Edge, ...]) -> Iterator[Schedule]:
    """Each order once, under the first of its names."""
    seen = set()
    for name in (name for name in ORDERS if fits(name, num_stages, num_ranks)):
        for cap in (None, *range(1, max(2 * num_ranks, count) + 1)) if name in LINEAR else (None,):
            found = replace(named(name, num_stages, count, num_ranks, cap), edges=edges)
            if found.actions not in seen:
                seen.add(found.actions)
                yield found if cap is None else replace(found, name=f"{name}, {cap} in flight")


def _frames(num_stages: int, count: int, num_ranks: int, edges: tuple[Edge, ...]) -> Iterator[Schedule]:
    """Empty schedules, one for each place of the stages."""
    rows = ((),) * num_ranks
    yield Schedule("list", rows, looped_place(num_stages, num_ranks), count, edges)
    if num_stages > num_ranks:
        yield Schedule("list in a V", rows, v_place(num_stages, num_ranks), count, edges)


def _searches(frame: Schedule, costs: Costs, memory: int | None) -> Iterator[tuple[str, list[float], Policy]]:
    """What each search is called, the bytes that each rank may save, and how it chooses."""
    ranks = range(frame.num_ranks)
    saved = [sum(costs.stages[stage].saved for stage in frame.stages_on(rank)) for rank in ranks]
    shared = (True, False) if frame.num_stages == frame.num_ranks else (False,)
    for cap, (room, left) in product(_counts(frame.num_ranks, frame.num_microbatches), _rooms(frame, costs, memory)):
        caps = [min(cap * nbytes, most) for nbytes, most in zip(saved, room, strict=True)]
        shares = tuple(1 + share(rank, frame.num_ranks, cap) for rank in ranks)
        for is_shared, overhang in product(shared, OVERHANGS):
            name = f", {cap} in flight, W over by {overhang}" + (", shared" if is_shared else "") + left
            yield name, caps, Policy(True, overhang, shares if is_shared else None)
        yield f", {cap} in flight, B{left}", caps, Policy(False)


def _rooms(frame: Schedule, costs: Costs, memory: int | None) -> list[tuple[list[float], str]]:
    """What each rank may save at most: all that is not resident, or that less a message over each of its edges."""
    if memory is None:
        return [([inf] * frame.num_ranks, "")]
    room: list[float] = [memory] * frame.num_ranks
    for stage, rank in enumerate(frame.place):
        room[rank] -= costs.stages[stage].resident
    left = list(room)
    for edge in frame.edges:
        for stage in (edge.source, edge.target):
            left[frame.place[stage]] -= costs.message_bytes.get(edge, 0)
    return [(room, "")] if left == room else [(room, ""), (left, ", room for messages")]


def _counts(num_ranks: int, count: int) -> list[int]:
    """Caps on microbatches in flight, from one to all of them, that are tried with a search each."""
    near = [-(-num_ranks * quarters // 4) for quarters in (2, 4, 5, 6, 7, 8, 10, 12)]
    return sorted({1, count, *(cap for cap in near if cap < count)})


def lower_bound(frame: Schedule, costs: Costs | StageCost | None = None, memory: int | None = None) -> float:
    """Seconds that any order takes, with the frame's place, edges and microbatches, within so many bytes a rank.

    A rank computes everything after the first microbatch has come down to it. And a stage alone on its rank does all F
    and I, and as many W as do not fit into memory any more, before its last I has been done; then that microbatch goes
    on up to the first stage, whose W comes last.
    """
    known = costs_for(frame.num_stages, costs)
    first, last = _heads(frame, known), _tails(frame, known)
    return max(_rank_bound(frame, known, memory, rank, first, last) for rank in range(frame.num_ranks))


def _rank_bound(
    frame: Schedule, costs: Costs, memory: int | None, rank: int, heads: list[float], tails: list[float]
) -> float:
    stages = frame.stages_on(rank)
    count, own = frame.num_microbatches, [costs.stages[stage] for stage in stages]
    head = min(heads[stage] for stage in stages)
    all_work = head + count * sum(cost.forward + cost.input + cost.weight for cost in own)
    if len(stages) > 1:
        return all_work
    (cost,) = own
    room = count if memory is None or not cost.held else (memory - cost.resident) // cost.held
    done = max(0, count - room) * cost.weight
    return max(all_work, head + count * (cost.forward + cost.input) + done + tails[stages[0]])


def _heads(frame: Schedule, costs: Costs) -> list[float]:
    """When the first microbatch reaches each stage at the earliest; stages read of those before them."""
    entering, heads = edges_into(frame.edges), [0.0] * frame.num_stages
    for stage in range(frame.num_stages):
        for edge in entering.get((stage, "F"), ()):
            made = heads[edge.source] + costs.stages[edge.source].forward
            heads[stage] = max(heads[stage], made + _transfer(frame, costs, edge))
    return heads


def _tails(frame: Schedule, costs: Costs) -> list[float]:
    """How long it takes at least from a stage's last I until all is done: its W, or what the stages before it do."""
    leaving, tails = edges_from(frame.edges), [cost.weight for cost in costs.stages]
    for stage in range(frame.num_stages):
        for edge in leaving.get((stage, "B"), ()):
            after = costs.stages[edge.target].input + tails[edge.target]
            tails[stage] = max(tails[stage], _transfer(frame, costs, edge) + after)
    return tails


def _transfer(frame: Schedule, costs: Costs, edge: Edge) -> float:
    return 0 if frame.place[edge.source] == frame.place[edge.target] else costs.transfer_seconds(edge)
