"""What else would bring a value from one sharding to another, beside the steps that plan_reshard chose.

The same moves from the same states as in the search (move_axes.py), but through one dim more, and with no bound on what
is held on the way; of each sequence of kinds the one that sends the fewest bytes. A sequence that does all that another
one does, and more, is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property, lru_cache

from shardc.collective import Step
from shardc.sharding import Sharding, TensorType

from .move_axes import Move, Space, State, moves_from
from .plain_steps import search_space, steps_of
from .plan_reshard import plan_reshard
from .reshard_plan import collectives_of_steps

MOST = 3  # steps of a sequence
Steps = tuple[Step, ...]


class _Roomy(Space):
    """The space with no bound on the size of a local value."""

    @cached_property
    def bound(self) -> int:
        """The whole value."""
        return self.scale


@lru_cache(maxsize=1024)
def compare_steps(src: Sharding, dst: Sharding, type: TensorType) -> tuple[Steps, ...]:
    """The steps of ``plan_reshard``, and then others, those that send fewer bytes first."""
    chosen = plan_reshard(src, dst, type)
    if not chosen or any(cut.minor for cut in src.dims + dst.dims):
        return (chosen,)
    best: dict[tuple[str, ...], Steps] = {}
    for steps in _sequences(src, dst, type.shape):
        kinds = kinds_of(steps)
        if kinds not in best or sent(src, steps, type) < sent(src, best[kinds], type):
            best[kinds] = steps
    best.pop(kinds_of(chosen), None)
    found = [chosen]
    for steps in sorted(best.values(), key=lambda steps: (sent(src, steps, type), len(steps))):
        if not any(_does_more(steps, other) for other in [*found, *best.values()] if other is not steps):
            found.append(steps)
    return tuple(found)


def kinds_of(steps: Steps) -> tuple[str, ...]:
    """The kinds of the steps in order, views apart."""
    return tuple(step.kind for step in steps if step.kind != "view")


def sent(src: Sharding, steps: Steps, type: TensorType) -> int:
    """Bytes that one rank sends in steps from a sharding."""
    return sum(each.wire_bytes for each in collectives_of_steps(src, steps, type))


def held(src: Sharding, steps: Steps, type: TensorType) -> int:
    """The most bytes that one rank holds of the value at a time, before, between or after steps from a sharding."""
    local = [src.local_shape(type.shape), *(step.sharding.local_shape(step.shape) for step in steps)]
    return max(map(math.prod, local)) * type.dtype.itemsize


def _sequences(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> Iterator[Steps]:
    plain, atoms, active, _ = search_space(src, dst, shape, is_wide=True)
    space = _Roomy(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    for moves in _ways(space, space.src, ()):
        yield tuple(steps_of(moves, space, atoms, active, src, shape))


def _ways(space: Space, state: State, before: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """The ways from a state to the target that come to no state twice."""
    if state == space.dst:
        yield before
    elif len(before) < MOST:
        known = {move.before for move in before}
        for move, _ in moves_from(space, state):
            if move.after not in known:
                yield from _ways(space, move.after, (*before, move))


def _does_more(steps: Steps, other: Steps) -> bool:
    """Whether the kinds of one are those of the other and more."""
    ours, theirs = Counter(kinds_of(steps)), Counter(kinds_of(other))
    return theirs < ours
