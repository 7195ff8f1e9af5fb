"""The fastest schedule for given costs under a cap on memory: the best of a portfolio, each of which is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from shardc.action import Edge, Schedule
from shardc.error import OptionError
from shardc.schedule_bound import lower_bound
from shardc.schedule_greedy import Policy, greedy
from shardc.schedule_order import LINEAR, ORDERS, fits, looped_place, named, share, v_place
from shardc.schedule_run import makespan
from shardc.schedule_time import peak_bytes, saved_bytes
from shardc.stage_cost import Costs

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
