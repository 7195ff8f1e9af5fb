"""Units that are no chain, as two towers are none: which stage each belongs to, no stage before those it reads from.

What is done after some stages is a set of units that holds all that its units read: an ideal. A cut of the graph into
stages is a walk through ideals, so that the walk of ``min_max`` is exact where ideals can be counted. A chain of n
units has n + 1, two towers of n have (n + 1)**2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.chain import balance, check_stages, exact_weights
from shardc.min_max import Walk

MOST_IDEALS = 1000
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The stage of each unit. No assignment has a heaviest stage lighter than ``bound``, a part of ``heaviest``.

    ``is_exact``: no assignment is better.
    """

    stages: tuple[int, ...]
    heaviest: Any
    bound: Any

    @property
    def is_exact(self) -> bool:
        """Whether the bound is met."""
        return bool(self.heaviest == self.bound)


def balance_dag(weights: Sequence[Any], edges: Iterable[Edge], num_stages: int) -> Assignment:
    """The stage of each unit, so that the heaviest stage is as light as can be; then most even.

    ``edges``: pairs of a unit and one that reads from it, which comes after it. Exact where there are at most
    ``MOST_IDEALS`` ideals; else the units are cut in their order and in that of a walk tower by tower, and ``bound``
    is the mean or the heaviest unit. Raises a ShardingError for fewer units than stages and for what is no weight.
    """
    exact = exact_weights(weights)
    check_stages(len(exact), num_stages)
    masks = ideals(len(exact), edges)
    if masks is None:
        return _in_order(weights, exact, list(edges), num_stages)
    behind = [sum(weight for unit, weight in enumerate(exact) if mask >> unit & 1) for mask in masks]
    found = walk(masks, num_stages, lambda _, start, end: behind[end] - behind[start], behind).best()
    assert found is not None, (len(exact), num_stages)
    stages = stages_of([masks[i] for i in found], len(exact))
    heaviest = _heaviest(weights, stages)
    return Assignment(stages, heaviest, heaviest)


def ideals(num_units: int, edges: Iterable[Edge], most: int = MOST_IDEALS) -> list[int] | None:
    """Every ideal as a mask of units, the smaller before the larger; None where there are more than ``most``."""
    needs = [0] * num_units
    for source, reader in edges:
        needs[reader] |= 1 << source
    latest, found = {0}, [0]
    for _ in range(num_units):
        latest = {
            mask | 1 << unit
            for mask in latest
            for unit in range(num_units)
            if not mask >> unit & 1 and needs[unit] & ~mask == 0
        }
        found += sorted(latest)
        if len(found) > most:
            return None
    return found


def walk(
    masks: Sequence[int],
    num_stages: int,
    load: Callable[[int, int, int], int | None],
    behind: Sequence[int],
    received: Callable[[int, int], int] = lambda start, end: 0,
    rises: bool = True,
) -> Walk:
    """The walk through ideals; ``behind`` is what each weighs, and ``rises`` says that loads go with it."""
    order = sorted(range(1, len(masks)), key=lambda i: (behind[i], i))
    after = [[i for i in order if masks[i] != mask and masks[i] & mask == mask] for mask in masks]
    return Walk(num_stages, len(masks) - 1, after.__getitem__, load, received, rises)


def stages_of(masks: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit, given what is done after each stage but the last."""
    return tuple(sum(not mask >> unit & 1 for mask in masks) for unit in range(num_units))


def _in_order(weights: Sequence[Any], exact: Sequence[int], edges: Sequence[Edge], num_stages: int) -> Assignment:
    found: list[tuple[Any, tuple[int, ...]]] = []
    for order in (list(range(len(exact))), _by_depth(len(exact), edges)):
        cuts = balance([exact[unit] for unit in order], num_stages)
        stage = {unit: sum(place >= cut for cut in cuts) for place, unit in enumerate(order)}
        stages = tuple(stage[unit] for unit in range(len(exact)))
        found.append((_heaviest(weights, stages), stages))
    heaviest, stages = min(found)
    mean = sum(exact) / num_stages
    largest = max(range(len(exact)), key=exact.__getitem__)
    bound = weights[largest] if exact[largest] >= mean else sum(weights) / num_stages
    return Assignment(stages, heaviest, bound)


def _by_depth(num_units: int, edges: Sequence[Edge]) -> list[int]:
    """The units by the longest way to them, so that towers go side by side."""
    depth = [0] * num_units
    for source, reader in sorted(edges, key=lambda edge: edge[1]):
        depth[reader] = max(depth[reader], depth[source] + 1)
    return sorted(range(num_units), key=lambda unit: (depth[unit], unit))


def _heaviest(weights: Sequence[Any], stages: Sequence[int]) -> Any:
    return max(
        sum(weight for weight, its in zip(weights, stages, strict=True) if its == stage) for stage in set(stages)
    )
