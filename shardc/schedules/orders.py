"""The named schedules: in which order each rank of a pipeline computes its stages' microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from shardc.language.errors import ShardingError, did_you_mean
from shardc.schedules.schedule import Action, Edge, Schedule, chain

if TYPE_CHECKING:
    from shardc.schedules.simulate import Costs, StageCost


def schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    in_flight: int | None = None,
    edges: Iterable[Edge] | None = None,
    costs: Costs | StageCost | None = None,
    memory: int | None = None,
    place: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of that name, compute-only; a ShardingError where there is none.

    ``num_stages`` are those of the whole model, ``num_ranks`` as many, or half of them for ``interleaved``,
    ``interleaved-zb`` and ``zb-v``. ``in_flight`` caps the microbatches that a rank of ``1f1b``, ``zb-h1`` or ``zb-h2``
    has begun and not ended. ``auto`` is the fastest of all these and of a list scheduler's, by ``costs``, of those that
    need no more than ``memory`` bytes on any rank, and, where ``place`` is given, have each stage on that rank.
    Messages go over ``edges``, from earlier stages to later ones in forward, back in backward; by default over the
    chain of stages.
    """
    _check_counts(name, num_stages, num_microbatches, in_flight)
    ranks = num_ranks if num_ranks is not None else num_stages // 2 if name in CHUNKED else num_stages
    _check_ranks(name, num_stages, ranks)
    over = chain(num_stages) if edges is None else tuple(edges)
    if name != "auto":
        return replace(named(name, num_stages, num_microbatches, ranks, in_flight), edges=over)
    from shardc.schedules.search import fastest
    from shardc.schedules.simulate import costs_for

    settled = None if place is None else tuple(place)
    return fastest(num_microbatches, ranks, over, costs_for(num_stages, costs), memory, settled)


def named(name: str, num_stages: int, count: int, num_ranks: int, in_flight: int | None = None) -> Schedule:
    """The schedule of that name, whose counts fit."""
    place = v_place(num_stages, num_ranks) if name == "zb-v" else looped_place(num_stages, num_ranks)
    rows = []
    for rank in range(num_ranks):
        stages = [stage for stage, home in enumerate(place) if home == rank]
        rows.append(tuple(ORDERS[name](rank, num_ranks, stages, count, in_flight)))
    return Schedule(name, tuple(rows), place, count, chain(num_stages))


def looped_place(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Ranks 0, 1, 2, 0, 1, 2."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_place(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Ranks 0, 1, 2, 2, 1, 0: the first rank holds the last stage too."""
    turns = (divmod(stage, num_ranks) for stage in range(num_stages))
    return tuple(num_ranks - 1 - at if turn % 2 else at for turn, at in turns)


def _gpipe(_: int, __: int, stages: Sequence[int], count: int, ___: int | None) -> Iterator[Action]:
    """All forward, then all backward; Huang et al. 2019. Several stages of a rank come one after the other."""
    yield from (Action("F", stage, i) for stage in stages for i in range(count))
    yield from (Action("B", stage, i) for stage in reversed(stages) for i in range(count))


def _one_forward_one_backward(
    rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None
) -> Iterator[Action]:
    """PipeDream-flush, Narayanan et al. 2021: stage i has begun at most K - i microbatches that it has not ended.

    With another cap the stages share it evenly, from all of it down to one.
    """
    ahead = share(rank, num_ranks, cap or num_ranks)
    return _spell(stages, count, ("F", min(1 + ahead, count)), ("B F", count))


def _interleaved(
    rank: int, num_ranks: int, stages: Sequence[int], count: int, _: int | None, steps: int = 2
) -> Iterator[Action]:
    """Narayanan et al. 2021b: a round of microbatches through every stage of a rank, then the next round.

    Rounds hold as many microbatches as there are ranks, or a few more, the larger first, where these do not divide.
    A rank is ahead of the next one by so many ``steps``: a microbatch goes down to it and comes back.
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
    """Interleaved, with backward in two as in ZB-H1, and with its memory: a rank is ahead by half as much."""
    owed: deque[Action] = deque()
    for action in _interleaved(rank, num_ranks, stages, count, cap, steps=1):
        yield action if action.kind == "F" else replace(action, kind="I")
        owed.extend([replace(action, kind="W")] if action.kind == "B" else [])
        if len(owed) > rank:
            yield owed.popleft()
    yield from owed


def _zero_bubble_1(rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None) -> Iterator[Action]:
    """ZB-H1, Qi et al. 2023: 1F1B with its memory; the lower a rank, the more W it owes, which fill its last gaps."""
    cap = cap or num_ranks
    ahead = share(rank, num_ranks, cap)
    owed = cap - 1 - ahead
    return _spell(stages, count, ("F", ahead), ("F I", owed), ("F I W", max(count - owed, 0)), ("W", owed))


def _zero_bubble_2(rank: int, num_ranks: int, stages: Sequence[int], count: int, cap: int | None) -> Iterator[Action]:
    """ZB-H2: the same with nearly twice the memory: no rank waits once it has begun."""
    return _zero_bubble_1(rank, num_ranks, stages, count, cap or 2 * num_ranks - 1)


def share(rank: int, num_ranks: int, cap: int) -> int:
    """Of a cap on microbatches, how many a rank is ahead in forward, from all but one on the first down to none."""
    return -(-(cap - 1) * (num_ranks - 1 - rank) // max(num_ranks - 1, 1))


def _zero_bubble_v(rank: int, num_ranks: int, stages: Sequence[int], count: int, _: int | None) -> Iterator[Action]:
    """ZB-V, Qi et al. 2024: two stages a rank, down the ranks and up again, with the memory of 1F1B."""
    below, rounds = num_ranks - rank, max(count - num_ranks, num_ranks - 1)
    fill = ("F", 2 * below - 1), ("F' F", rank), ("F' I' W'", below)
    drain = ("I I'", rank), ("I W", below), ("W'", rank), ("W", rank)
    return _spell(stages, count, *fill, ("F I W F' I' W'", rounds), *drain)


def _spell(stages: Sequence[int], count: int, *words: tuple[str, int]) -> Iterator[Action]:
    """Each word so many times: each letter is the next microbatch of its kind, until there are no more.

    ``F'`` is of the rank's second stage.
    """
    done: dict[str, int] = {}
    for letter in (letter for word, times in words for letter in word.split() * times):
        microbatch = done.get(letter, 0)
        done[letter] = microbatch + 1
        if microbatch < count:
            yield Action(letter[0], stages[letter.count("'")], microbatch)


Order = Callable[[int, int, Sequence[int], int, int | None], Iterator[Action]]
ORDERS: dict[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "interleaved-zb": _interleaved_zero_bubble,
    "zb-h1": _zero_bubble_1,
    "zb-h2": _zero_bubble_2,
    "zb-v": _zero_bubble_v,
}
CHUNKED = ("interleaved", "interleaved-zb", "zb-v")  # two stages a rank or more
LINEAR = ("1f1b", "zb-h1", "zb-h2")  # one, and a cap on microbatches in flight


def fits(name: str, num_stages: int, num_ranks: int) -> bool:
    """Whether the schedule of that name can have so many stages on so many ranks, which divide them."""
    chunks = num_stages // num_ranks
    return chunks == 1 if name in LINEAR else chunks == 2 if name == "zb-v" else chunks > 1 or name not in CHUNKED


def _check_counts(name: str, num_stages: int, num_microbatches: int, in_flight: int | None) -> None:
    if name not in (*ORDERS, "auto"):
        names = (*ORDERS, "auto")
        hint = did_you_mean(name, names) or f"say one of {', '.join(names)}"
        raise ShardingError("schedule", repr(name), "there is no such schedule", hint)
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "in_flight": in_flight}
    for what, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ShardingError(f"schedule {name}", f"{what}={count!r}", "it counts from 1", f"say {what}=1 or more")


def _check_ranks(name: str, num_stages: int, num_ranks: int) -> None:
    what, who = f"{num_stages} stages on {num_ranks} ranks", f"schedule {name}"
    if num_ranks < 1 or num_stages % num_ranks:
        raise ShardingError(who, what, "ranks hold equally many stages", "say num_stages as a multiple of num_ranks")
    if not fits(name, num_stages, num_ranks):
        problem = "it has one stage a rank" if name in LINEAR else "it has two stages a rank"
        others = [other for other in ORDERS if fits(other, num_stages, num_ranks)]
        raise ShardingError(who, what, problem, f"say {' or '.join(others)} for these")
