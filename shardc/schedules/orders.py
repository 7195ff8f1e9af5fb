"""The named schedules: the order in which each rank of a pipeline computes the microbatches of its stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from shardc.schedules.schedule import Action, Edge, Schedule


def schedule_named(
    name: str, edges: tuple[Edge, ...], num_stages: int, num_microbatches: int, num_ranks: int,
    in_flight: int | None = None,
) -> Schedule:  # fmt: skip
    """The compute-only schedule of a name in ``ORDERS``, for counts that fit it."""
    place = v_place(num_stages, num_ranks) if name == "zb-v" else looped_place(num_stages, num_ranks)
    rows = []
    for rank in range(num_ranks):
        stages = [stage for stage, home in enumerate(place) if home == rank]
        rows.append(tuple(ORDERS[name](rank, num_ranks, stages, num_microbatches, in_flight)))
    return Schedule(name, tuple(rows), place, num_microbatches, edges)


def looped_place(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, in the order 0, 1, 2, 0, 1, 2."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_place(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, in the order 0, 1, 2, 2, 1, 0: the first rank has the last stage too."""
    rounds = (divmod(stage, num_ranks) for stage in range(num_stages))
    return tuple(num_ranks - 1 - at if number % 2 else at for number, at in rounds)


def fits(name: str, num_stages: int, num_ranks: int) -> bool:
    """Whether the named schedule can run ``num_stages`` stages on ``num_ranks`` ranks, which divide them."""
    chunks = num_stages // num_ranks
    if name in LINEAR:
        return chunks == 1
    return chunks == 2 if name == "zb-v" else chunks > 1 or name not in CHUNKED


def lead(rank: int, num_ranks: int, cap: int) -> int:
    """The microbatches that a rank is ahead in forward: ``cap - 1`` on the first rank, evenly down to 0 on the last."""
    return -(-(cap - 1) * (num_ranks - 1 - rank) // max(num_ranks - 1, 1))


def _gpipe(_: int, __: int, stages: Sequence[int], count: int, ___: int | None) -> Iterator[Action]:
    """All forward, then all backward; several stages of a rank one after the other. Huang et al. 2019."""
    yield from (Action("F", stage, i) for stage in stages for i in range(count))
    yield from (Action("B", stage, i) for stage in reversed(stages) for i in range(count))


def _1f1b(rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None) -> Iterator[Action]:
    """PipeDream-flush: stage i of K has at most K - i microbatches in flight. Narayanan et al. 2021.

    ``cap``: microbatches in flight on the first stage; it falls evenly to 1 on the last.
    """
    return _spell(stages, count, ("F", min(1 + lead(rank, num_ranks, cap or num_ranks), count)), ("B F", count))


def _interleaved(
    rank: int, num_ranks: int, stages: Sequence[int], count: int, _: int | None, steps: int = 2
) -> Iterator[Action]:
    """A round of microbatches goes through every stage of a rank, then the next round. Narayanan et al. 2021b.

    A round has as many microbatches as there are ranks. If these do not divide the count, the first rounds have a few
    more. ``steps``: the number of warm-up forwards that a rank has beyond those of the next one (2: there and back).
    """
    num_rounds = max(1, count // num_ranks)
    size, larger = divmod(count, num_rounds)
    starts = [i * size + min(i, larger) for i in range(num_rounds + 1)]
    rounds = [range(*ends) for ends in pairwise(starts)]
    forward = [Action("F", stage, i) for one in rounds for stage in stages for i in one]
    backward = [Action("B", stage, i) for one in rounds for stage in reversed(stages) for i in one]
    ahead = (len(stages) - 1) * len(rounds[0]) + steps * (num_ranks - 1 - rank)
    yield from forward[:ahead]
    for i, action in enumerate(backward):
        yield from forward[ahead + i : ahead + i + 1]
        yield action


def _interleaved_zero_bubble(
    rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None
) -> Iterator[Action]:
    """Interleaved with backward split as in ZB-H1, and with its memory: a rank is ahead by half as much."""
    owed: deque[Action] = deque()
    for action in _interleaved(rank, num_ranks, stages, count, cap, steps=1):
        yield action if action.kind == "F" else replace(action, kind="I")
        owed.extend([replace(action, kind="W")] if action.kind == "B" else [])
        if len(owed) > rank:
            yield owed.popleft()
    yield from owed


def _zero_bubble_1(rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None) -> Iterator[Action]:
    """ZB-H1, with the memory of 1F1B: later ranks put off more W, which fill their gaps at the end. Qi et al. 2023."""
    cap = cap or num_ranks
    ahead = lead(rank, num_ranks, cap)
    owed = cap - 1 - ahead
    return _spell(stages, count, ("F", ahead), ("F I", owed), ("F I W", max(count - owed, 0)), ("W", owed))


def _zero_bubble_2(rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None) -> Iterator[Action]:
    """ZB-H2, with nearly twice the memory of 1F1B: no rank waits after its first computation. Qi et al. 2023."""
    return _zero_bubble_1(rank, num_ranks, stages, count, cap or 2 * num_ranks - 1)


def _zero_bubble_v(rank: int, num_ranks: int, stages: Sequence[int], count: int, _: int | None) -> Iterator[Action]:
    """ZB-V, with the memory of 1F1B: two stages a rank, down the ranks and up again. Qi et al. 2024."""
    below, rounds = num_ranks - rank, max(count - num_ranks, num_ranks - 1)
    fill = ("F", 2 * below - 1), ("F' F", rank), ("F' I' W'", below)
    drain = ("I I'", rank), ("I W", below), ("W'", rank), ("W", rank)
    return _spell(stages, count, *fill, ("F I W F' I' W'", rounds), *drain)


def _spell(stages: Sequence[int], count: int, *words: tuple[str, int]) -> Iterator[Action]:
    """The actions that ``words`` spell, each word repeated: ``("F I", 2)`` is F I F I.

    A letter stands for the next microbatch of its kind, and for nothing once all are done; ``F'`` is of the rank's
    second stage.
    """
    done: dict[str, int] = {}
    for letter in (letter for word, times in words for letter in word.split() * times):
        microbatch = done.get(letter, 0)
        done[letter] = microbatch + 1
        if microbatch < count:
            yield Action(letter[0], stages[letter.count("'")], microbatch)


# takes the rank, the number of ranks, the rank's stages, the number of microbatches, and a cap on those in flight
Order = Callable[[int, int, Sequence[int], int, int | None], Iterator[Action]]
ORDERS: dict[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "interleaved-zb": _interleaved_zero_bubble,
    "zb-h1": _zero_bubble_1,
    "zb-h2": _zero_bubble_2,
    "zb-v": _zero_bubble_v,
}
CHUNKED = ("interleaved", "interleaved-zb", "zb-v")  # two stages a rank or more
LINEAR = ("1f1b", "zb-h1", "zb-h2")  # one stage a rank, and a cap on microbatches in flight
