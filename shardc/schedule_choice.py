"""The fastest schedule for given costs under a cap on memory: the best of a portfolio, each of which is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from shardc.action import Schedule, chain
from shardc.error import ShardingError
from shardc.schedule_greedy import Policy, greedy
from shardc.schedule_order import LINEAR, ORDERS, fits, looped_place, named, v_place
from shardc.schedule_run import run
from shardc.schedule_time import peak_bytes, saved_bytes
from shardc.stage_cost import Costs, StageCost, costs_for

POLICIES = {f"W over by {part}": Policy(True, part) for part in (0.25, 0.5, 0, 1)} | {"B": Policy(False)}


def fastest(
    num_stages: int, count: int, num_ranks: int, costs: Costs | StageCost | None = None, memory: int | None = None
) -> Schedule:
    """The candidate of the shortest makespan, of those the one of the lowest peak, of those the first.

    Candidates are all named schedules that fit, with several caps on microbatches in flight, and those of a list
    scheduler for every place of the stages, with several caps and policies. No rank needs more than ``memory`` bytes;
    a ShardingError where that is less than any candidate can do.
    """
    best = _Best(costs_for(num_stages, costs), memory)
    for candidate in _named(num_stages, count, num_ranks):
        best.offer(max(end for *_, end in run(candidate, best.costs)), candidate)
    for frame, caps, policy in _searches(num_stages, count, num_ranks, best.costs, memory):
        found = greedy(frame, best.costs, caps, policy, best.makespan)
        if found:
            best.offer(*found)
    if best.schedule is None:
        what = f"memory={memory}, {num_stages} stages on {num_ranks} ranks"
        problem = f"no schedule is known that needs less than {best.least} bytes on its fullest rank"
        raise ShardingError("schedule auto", what, problem, f"allow {best.least} bytes, or save less in each stage")
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


def _named(num_stages: int, count: int, num_ranks: int) -> Iterator[Schedule]:
    """Each order once, under the first of its names."""
    seen = set()
    for name in (name for name in ORDERS if fits(name, num_stages, num_ranks)):
        for cap in (None, *range(1, max(2 * num_ranks, count) + 1)) if name in LINEAR else (None,):
            found = named(name, num_stages, count, num_ranks, cap)
            if found.actions not in seen:
                seen.add(found.actions)
                yield found if cap is None else replace(found, name=f"{name}, {cap} in flight")


def _counts(num_ranks: int, count: int) -> list[int]:
    """Caps on microbatches in flight, from one to all of them, that are tried with a search each."""
    near = [-(-num_ranks * quarters // 4) for quarters in (2, 4, 5, 6, 7, 8, 10, 12)]
    return sorted({1, count, *(cap for cap in near if cap < count)})


def _searches(
    num_stages: int, count: int, num_ranks: int, costs: Costs, memory: int | None
) -> Iterator[tuple[Schedule, list[int], Policy]]:
    places = {"": looped_place(num_stages, num_ranks)} | (
        {" in a V": v_place(num_stages, num_ranks)} if num_stages > num_ranks else {}
    )
    for where, place in places.items():
        homes = [[costs.stages[stage] for stage, home in enumerate(place) if home == rank] for rank in range(num_ranks)]
        for cap in reversed(_counts(num_ranks, count)):
            caps = [cap * sum(cost.saved for cost in home) for home in homes]
            if memory is not None:
                room = [memory - sum(cost.resident for cost in home) for home in homes]
                caps = [min(pair) for pair in zip(caps, room, strict=True)]
            for what, policy in POLICIES.items():
                name = f"list{where}, {cap} in flight, {what}"
                rows = ((),) * num_ranks
                yield Schedule(name, rows, place, count, chain(num_stages)), caps, policy
