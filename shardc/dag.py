"""Units that are no chain, as two towers are none: which stage each belongs to, no stage before those it reads from.

What is done after some stages is a set of units that holds all that its units read: an ideal. A cut of the graph into
stages is a walk through ideals, so that the walk of ``min_max`` is exact where ideals can be counted. A chain of n
units has n + 1, two towers of n have (n + 1)**2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardc.min_max import Walk

MOST_IDEALS = 1000
Edge = tuple[int, int]


def ideals(num_units: int, edges: Iterable[Edge], most: int = MOST_IDEALS) -> list[int] | None:
    """Every ideal as a mask of units, the smaller before the larger; None where there are more than ``most``.

    ``edges``: pairs of a unit and one that reads from it, which comes after it.
    """
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


def stages_after(masks: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit, given what is done after each stage but the last."""
    return tuple(sum(not mask >> unit & 1 for mask in masks) for unit in range(num_units))
