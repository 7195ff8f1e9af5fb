"""The named schedules: in which order each rank of a pipeline computes its stages' microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain as joined

from shardc.action import Action, Schedule, chain
from shardc.error import ShardingError, did_you_mean

Rows = Sequence[Iterable[Action]]


def schedule(
    name: str, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None, in_flight: int | None = None
) -> Schedule:
    """The schedule of that name, compute-only, over the chain of stages; a ShardingError where there is none.

    ``num_stages`` are those of the whole model. ``num_ranks`` is as many, or half of them for ``interleaved`` and
    ``zb-v``. ``in_flight`` caps the microbatches of ``1f1b`` that the first rank has begun and not ended.
    """
    _check_counts(name, num_stages, num_microbatches, in_flight)
    ranks = num_ranks if num_ranks is not None else num_stages // 2 if name in CHUNKED else num_stages
    _check_ranks(name, num_stages, ranks)
    rows = ORDERS[name](num_stages, ranks, num_microbatches, in_flight)
    actions = tuple(map(tuple, rows))
    place = tuple(_home(actions, stage) for stage in range(num_stages))
    return Schedule(name, actions, place, num_microbatches, chain(num_stages))


def _home(actions: Sequence[Sequence[Action]], stage: int) -> int:
    return next(rank for rank, row in enumerate(actions) if any(action.stage == stage for action in row))


def _gpipe(num_stages: int, num_ranks: int, count: int, _: int | None) -> Rows:
    """All forward, then all backward; Huang et al. 2019. Of several stages a rank one after the other."""
    return [
        joined(
            (Action("F", stage, i) for stage in range(rank, num_stages, num_ranks) for i in range(count)),
            (Action("B", stage, i) for stage in reversed(range(rank, num_stages, num_ranks)) for i in range(count)),
        )
        for rank in range(num_ranks)
    ]


def _one_forward_one_backward(num_stages: int, _: int, count: int, in_flight: int | None) -> Rows:
    """PipeDream-flush, Narayanan et al. 2021: stage i has begun at most K - i microbatches that it has not ended.

    With another cap the stages share it evenly, from all of it down to one.
    """
    cap, last = in_flight or num_stages, num_stages - 1
    begun = [1 - (1 - cap) * (last - stage) // max(last, 1) if cap > 1 else 1 for stage in range(num_stages)]
    return [_alternate(stage, min(begun[stage], count), count) for stage in range(num_stages)]


def _alternate(stage: int, begun: int, count: int) -> Iterable[Action]:
    yield from (Action("F", stage, i) for i in range(begun))
    for i in range(count):
        yield Action("B", stage, i)
        if i + begun < count:
            yield Action("F", stage, i + begun)


ORDERS: dict[str, Callable[[int, int, int, int | None], Rows]] = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
CHUNKED = ("interleaved", "zb-v")  # two stages a rank or more
LINEAR = ("1f1b", "zb-h1", "zb-h2")  # one


def _check_counts(name: str, num_stages: int, num_microbatches: int, in_flight: int | None) -> None:
    if name not in ORDERS:
        hint = did_you_mean(name, ORDERS) or f"say one of {', '.join(ORDERS)}"
        raise ShardingError("schedule", repr(name), "there is no such schedule", hint)
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "in_flight": in_flight}
    for what, count in counts.items():
        if count is not None and count < 1:
            raise ShardingError(f"schedule {name}", f"{what}={count}", "it counts from 1", f"say {what}=1 or more")


def _check_ranks(name: str, num_stages: int, num_ranks: int) -> None:
    what, who = f"{num_stages} stages on {num_ranks} ranks", f"schedule {name}"
    if num_ranks < 1 or num_stages % num_ranks:
        raise ShardingError(who, what, "ranks hold equally many stages", "say num_stages as a multiple of num_ranks")
    if name in LINEAR and num_stages != num_ranks:
        raise ShardingError(who, what, "it has one stage a rank", "say interleaved or zb-v for more than one")
    if name == "zb-v" and num_stages != 2 * num_ranks:
        raise ShardingError(who, what, "it has two stages a rank", f"say num_stages={2 * num_ranks}")
