"""``balance``: a chain of units cut into stages, so that the heaviest stage is as light as can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any

from shardc.error import ShardingError
from shardc.min_max import Walk

Received = Callable[[int, int], int]


def balance(
    weights: Sequence[Any], num_stages: int, *, received: Received | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The indices at which a new stage starts: ``num_stages - 1``, increasing, none of the stages empty.

    The greatest sum of a stage's weights is least; of the cuts with that sum the most even ones (least sum of
    squares), of those the ones of fewest bytes, of those the first. Exact for whole numbers and floats of any size.
    ``received``: the bytes that a stage ``[start, end)`` is sent, or a number for the cut before each unit.
    ``forced``: indices that must be among the cuts. Raises a ShardingError where there are fewer units than stages,
    more forced cuts than stages have, or a weight that is no number of 0 or more.
    """
    exact, forced = exact_weights(weights), tuple(sorted(set(forced)))
    check_stages(len(exact), num_stages, forced)
    behind = list(accumulate(exact, initial=0))

    def load(stage: int, start: int, end: int) -> int:
        return behind[end] - behind[start]

    found = chain(len(exact), num_stages, load, received, forced).best()
    assert found is not None, (len(exact), num_stages, forced)
    return found


def chain(
    num_units: int,
    num_stages: int,
    load: Callable[[int, int, int], int | None],
    received: Received | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> Walk:
    """The walk along a chain; ``load`` of a stage by its number, its first unit and the one after its last."""

    def after(start: int) -> range:
        """No stage goes on beyond a forced cut."""
        place = bisect_left(forced, start + 1)
        return range(start + 1, (forced[place] if place < len(forced) else num_units) + 1)

    return Walk(num_stages, num_units, after, load, _received(received))


def _received(given: Received | Sequence[int] | None) -> Received:
    if given is None:
        return lambda start, end: 0
    if callable(given):
        return given
    by_cut = tuple(given)
    return lambda start, end: by_cut[start] if start else 0


def exact_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """The weights as whole numbers that compare and add as they do, without rounding."""
    try:
        fractions = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        raise _no_weight(weights, "they are not all finite numbers") from None
    if any(fraction < 0 for fraction in fractions):
        raise _no_weight(weights, "one is negative")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def check_stages(num_units: int, num_stages: int, forced: Sequence[int] = ()) -> None:
    """A ShardingError where so many units cannot be cut so."""
    who, what = "balance", f"{num_units} units, num_stages={num_stages!r}"
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ShardingError(who, what, "there is at least one stage", "say num_stages=1 or more")
    if num_units < num_stages:
        problem = "every stage holds at least one unit"
        raise ShardingError(who, what, problem, f"say num_stages={num_units} or less" if num_units else "give weights")
    if len(forced) >= num_stages or any(not 0 < cut < num_units for cut in forced):
        problem = f"forced={tuple(forced)}: {num_stages} stages have {num_stages - 1} cuts, from 1 to {num_units - 1}"
        raise ShardingError(who, what, problem, "force fewer cuts, or say more stages")


def _no_weight(weights: Any, problem: str) -> ShardingError:
    if not isinstance(weights, Sequence):
        return ShardingError(
            "balance", f"weights={weights!r}", "there is no list of weights", "write balance([3, 1], 2)"
        )
    shown = ", ".join(map(repr, list(weights)[:8])) + (", ..." if len(weights) > 8 else "")
    return ShardingError("balance", f"weights=[{shown}]", problem, "give every unit a weight of 0 or more")
