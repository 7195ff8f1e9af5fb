"""Finds the fastest schedule: every named order and many of a list scheduler, held against a lower bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from shardc.language.errors import OptionError
from shardc.schedules.costs import Costs, StageCost, costs_for
from shardc.schedules.events import makespan
from shardc.schedules.list_scheduler import Policy, greedy
from shardc.schedules.orders import LINEAR, ORDERS, fits, lead, looped_place, schedule_named, v_place
from shardc.schedules.schedule import Edge, Schedule, edges_from, edges_into
from shardc.schedules.simulate import peak_bytes, saved_bytes

OVERHANGS = (0.25, 0.5, 0, 1)


def fastest(
    count: int, num_ranks: int, edges: tuple[Edge, ...], costs: Costs, memory: int | None = None,
    place: tuple[int, ...] | None = None,
) -> Schedule:  # fmt: skip
    """The candidate of the shortest makespan; among equals the one of the lowest peak, then the first.

    Candidates are all named schedules that fit, with every cap on microbatches in flight. Unless one of them meets the
    lower bound, those of a list scheduler follow, for every place of the stages, with several caps and policies.
    ``count``: microbatches. ``memory``: bytes that a rank may need. ``place``: the rank of each stage, if it is fixed.
    Raises an OptionError if no candidate needs so little memory.
    """
    best, num_stages = _Best(costs, memory), len(costs.stages)
    known = set()  # the same order may have several names
    for name in (name for name in ORDERS if fits(name, num_stages, num_ranks)):
        for cap in (None, *range(1, max(2 * num_ranks, count) + 1)) if name in LINEAR else (None,):
            candidate = schedule_named(name, edges, num_stages, count, num_ranks, cap)
            if candidate.actions not in known and place in (None, candidate.place):
                known.add(candidate.actions)
                candidate = candidate if cap is None else replace(candidate, name=f"{name}, {cap} in flight")
                best.offer(makespan(candidate, costs, best.makespan), candidate)
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


@dataclass(slots=True)
class _Best:
    """The best schedule so far. ``least``: the least peak of all candidates, as long as none fits into memory."""

    costs: Costs
    memory: int | None
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
            candidate = greedy(replace(frame, name=frame.name + name), self.costs, caps, policy, self.makespan)
            if candidate:
                self.offer(*candidate)

    def offer(self, makespan: float, candidate: Schedule) -> None:
        """Take the candidate if it is better and fits. The bytes that it saves rule most out without a simulation."""
        saved = max(saved_bytes(candidate, self.costs))
        is_worse = makespan > self.makespan or (makespan == self.makespan and saved >= self.peak)
        if is_worse or (self.memory is not None and saved > self.memory and saved >= self.least):
            return
        peak = max(peak_bytes(candidate, self.costs))
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
    """The bytes that each rank may save: all that are not resident, or these less a message over each of its edges."""
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
    """Seconds that every order takes with the frame's place, edges and microbatches and so many bytes a rank.

    A rank computes everything after the first microbatch has reached it. A stage alone on its rank computes all F and
    I, and as many W as do not fit into memory, before its last I ends; then that microbatch goes on up to the first
    stage, whose W comes last.
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
