"""Cuts units into pipeline stages so that the heaviest stage is as light as possible, exactly, by dynamic programming.

``balance`` cuts a chain. ``ideal_path`` cuts a graph of units: its states are *ideals*, sets of units that contain
all that their units read, so that a stage is the difference of two ideals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any

from shardc.language.errors import ShardingError

MOST_IDEALS = 1000
Load = Callable[[int, int, int], int | None]  # of a stage, by its number, its first state and its last one
ReceivedBytes = Callable[[int, int], int]  # of a stage, by its first state and its last one


def balance(
    weights: Sequence[Any], num_stages: int, *, received: ReceivedBytes | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The indices at which a new stage starts: ``num_stages - 1``, increasing, no stage empty.

    The greatest sum of a stage's weights is minimal. Ties go to the most even cuts (least sum of squares), then to
    those of fewest bytes, then to the first. Exact for integers and floats of any size.

    ``received``: the bytes that a stage ``[start, end)`` receives, or a number for a cut before each unit. ``forced``:
    indices that must be among the cuts. Raises a ShardingError for fewer units than stages, for more forced cuts than
    stages have, and for weights that are not finite numbers of 0 or more.
    """
    exact, forced = exact_weights(weights), tuple(sorted(set(forced)))
    check_stages(len(exact), num_stages, forced)
    sums = list(accumulate(exact, initial=0))

    def received_bytes(start: int, end: int) -> int:
        if received is None or callable(received):
            return received(start, end) if received else 0
        return received[start] if start else 0

    path = chain_path(len(exact), num_stages, lambda _, start, end: sums[end] - sums[start], received_bytes, forced)
    cuts = path.best()
    assert cuts is not None, (len(exact), num_stages, forced)
    return cuts


def exact_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """The weights times one common factor that makes all of them integers, so that no sum is rounded."""
    try:
        fractions = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        raise _bad_weights(weights, "they are not all finite numbers") from None
    if any(fraction < 0 for fraction in fractions):
        raise _bad_weights(weights, "one is negative")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def _bad_weights(weights: Any, problem: str) -> ShardingError:
    if not isinstance(weights, Sequence):
        what, problem, remedy = f"weights={weights!r}", "there is no list of weights", "write balance([3, 1], 2)"
        return ShardingError("balance", what, problem, remedy)
    shown = ", ".join(map(repr, list(weights)[:8])) + (", ..." if len(weights) > 8 else "")
    return ShardingError("balance", f"weights=[{shown}]", problem, "give every unit a weight of 0 or more")


def check_stages(num_units: int, num_stages: int, forced: Sequence[int] = ()) -> None:
    """Raise a ShardingError if so many units cannot be cut into so many stages, or not at the ``forced`` indices."""
    who, what = "balance", f"{num_units} units, num_stages={num_stages!r}"
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ShardingError(who, what, "there is at least one stage", "say num_stages=1 or more")
    if num_units < num_stages:
        problem = "every stage holds at least one unit"
        raise ShardingError(who, what, problem, f"say num_stages={num_units} or less" if num_units else "give weights")
    if len(forced) >= num_stages or any(not 0 < cut < num_units for cut in forced):
        problem = f"forced={tuple(forced)}: {num_stages} stages have {num_stages - 1} cuts, from 1 to {num_units - 1}"
        raise ShardingError(who, what, problem, "force fewer cuts, or say more stages")


def chain_path(
    num_units: int, num_stages: int, load: Load, received_bytes: ReceivedBytes, forced: Sequence[int] = ()
) -> MinMaxPath:
    """The path along a chain, whose states are the numbers of units in the stages so far."""

    def following(start: int) -> range:
        """No stage goes on beyond a forced cut."""
        at = bisect_left(forced, start + 1)
        return range(start + 1, (forced[at] if at < len(forced) else num_units) + 1)

    return MinMaxPath(num_stages, num_units, following, load, received_bytes)


def ideal_path(
    masks: Sequence[int], num_stages: int, load: Load, weights: Sequence[int], received_bytes: ReceivedBytes,
    is_monotone: bool,
) -> MinMaxPath:  # fmt: skip
    """The path through the ideals ``masks``, by index. ``weights``: of each ideal, by which following ones are tried.

    ``is_monotone``: loads rise with these weights.
    """
    order = sorted(range(1, len(masks)), key=lambda i: (weights[i], i))
    following = [[i for i in order if masks[i] != mask and masks[i] & mask == mask] for mask in masks]
    return MinMaxPath(num_stages, len(masks) - 1, following.__getitem__, load, received_bytes, is_monotone)


def ideals(num_units: int, edges: Iterable[tuple[int, int]], most: int = MOST_IDEALS) -> list[int] | None:
    """Every ideal as a bit mask of units, smaller ones first; None if there are more than ``most``.

    ``edges``: pairs of a unit and a later one that reads from it.
    """
    needs = [0] * num_units
    for source, reader in edges:
        needs[reader] |= 1 << source
    latest, masks = {0}, [0]
    for _ in range(num_units):
        latest = {
            mask | 1 << unit
            for mask in latest
            for unit in range(num_units)
            if not mask >> unit & 1 and needs[unit] & ~mask == 0
        }
        masks += sorted(latest)
        if len(masks) > most:
            return None
    return masks


BestSuffix = dict[int, tuple[int, int, int]]  # by state: the sum of squares, the bytes, the next state


@dataclass(frozen=True, slots=True)
class MinMaxPath:
    """Paths from state 0 to state ``last``, one step for each stage; the best one has the least greatest load.

    ``following``: the states that may follow a state, in order of preference. ``load``: of a step; None if the step is
    not allowed. ``received_bytes``: of a step. ``is_monotone``: loads do not fall along ``following``, so that all
    states after one that is too heavy can be skipped.
    """

    num_stages: int
    last: int
    following: Callable[[int], Sequence[int]]
    load: Load
    received_bytes: ReceivedBytes
    is_monotone: bool = True

    def least(self) -> int | None:
        """The least possible greatest load; None if no path is allowed.

        State: ``row`` has for each state the least greatest load of the remaining steps.
        """
        row = {self.last: 0}
        for stage in reversed(range(self.num_stages)):
            least: dict[int, int] = {}
            for state in self._starts(stage):
                for end in self.following(state):
                    if end not in row or (load := self.load(stage, state, end)) is None:
                        continue
                    if self.is_monotone and state in least and load >= least[state]:
                        break
                    least[state] = min(max(load, row[end]), least.get(state, max(load, row[end])))
            row = least
        return row.get(0)

    def best(self) -> tuple[int, ...] | None:
        """The states between the steps of the best path; None if no path is allowed.

        The greatest load is minimal; ties go to the least sum of squares, then the fewest bytes, then the first path.
        """
        bound = self.least()
        if bound is None:
            return None
        rows: list[BestSuffix] = [{self.last: (0, 0, 0)}]
        for stage in reversed(range(self.num_stages)):
            suffixes = ((state, self._best_from(stage, state, rows[-1], bound)) for state in self._starts(stage))
            rows.append({state: suffix for state, suffix in suffixes if suffix is not None})
        states = [0]
        for row in rows[:0:-1]:
            states.append(row[states[-1]][2])
        return tuple(states[1:-1])

    def _starts(self, stage: int) -> range:
        return range(self.last) if stage else range(1)

    def _best_from(self, stage: int, state: int, row: BestSuffix, bound: int) -> tuple[int, int, int] | None:
        best: tuple[int, int, int] | None = None
        for end in self.following(state):
            if end not in row or (load := self.load(stage, state, end)) is None:
                continue
            if load > bound and self.is_monotone:
                break
            if load > bound:
                continue
            squares, nbytes = load * load + row[end][0], self.received_bytes(state, end) + row[end][1]
            if best is None or (squares, nbytes) < best[:2]:
                best = squares, nbytes, end
        return best


@dataclass(frozen=True, slots=True)
class Split:
    """The stage of each unit. ``heaviest``: the weight of the heaviest stage, or of the heaviest rank.

    ``bound``: no split is lighter than this, among those that were searched.
    """

    stages: tuple[int, ...]
    heaviest: Any
    bound: Any

    @property
    def is_exact(self) -> bool:
        """Whether the split meets its bound."""
        return bool(self.heaviest == self.bound)


def stages_after(masks: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit, given the ideal before each stage but the first."""
    return tuple(sum(not mask >> unit & 1 for mask in masks) for unit in range(num_units))
