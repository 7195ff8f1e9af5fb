"""Schedules as users see them: ``shardc.schedule`` makes one by name, ``shardc.Schedule`` checks and simulates it.

Inside the library the plain functions do the same: ``check``, ``with_messages``, ``simulate``, ``timeline_text``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Self, TypeVar

from shardc.language.errors import ShardingError, did_you_mean
from shardc.schedules import schedule as data
from shardc.schedules import timeline
from shardc.schedules.check import check
from shardc.schedules.orders import CHUNKED, LINEAR, ORDERS, fits, schedule_named
from shardc.schedules.schedule import Edge, chain_edges, from_csv, to_csv
from shardc.schedules.search import fastest
from shardc.schedules.simulate import Costs, StageCost, costs_for, simulate, with_messages
from shardc.schedules.timeline import chrome_trace, timeline_svg, timeline_text


class Schedule(data.Schedule):
    """The actions of every pipeline rank in order, and the rank of each stage."""

    __slots__ = ()

    def with_messages(self, edges: Iterable[Edge] | None = None, costs: Costs | None = None) -> Self:
        """The schedule with every message inserted: sent once it is computed, and received in the order of the sends.

        ``edges`` replace those of the schedule. ``costs`` decide which computation ends first; by default all take
        equally long. Raises a ShardingError if the order of computations cannot run.
        """
        return with_messages(self if edges is None else replace(self, edges=tuple(edges)), costs)

    def check(self) -> Self:
        """Prove that the schedule is complete and ends, and return it. Raises a ShardingError that names the fault."""
        check(self)
        return self

    def simulate(self, costs: Costs | StageCost | None = None) -> Timeline:
        """The timeline of a step, in seconds and bytes; by default F, I and W take one second each."""
        return Timeline.of(simulate(self, costs))

    def to_csv(self) -> str:
        """One line for each rank, as torch.distributed.pipelining reads it."""
        return to_csv(self)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv", edges: Iterable[Edge] | None = None) -> Self:
        """The schedule in a CSV of ``to_csv`` or torch. Raises a ShardingError for a cell that is no action."""
        return _as(cls, from_csv(text, name, edges))


class Timeline(timeline.Timeline):
    """The start of every action and message in seconds, and the most bytes alive on each rank."""

    __slots__ = ()

    @classmethod
    def of(cls, timeline: timeline.Timeline) -> Self:
        """The same timeline, with the methods that draw it."""
        return _as(cls, timeline)

    def text(self, width: int = 100) -> str:
        """One line for each rank, of at most ``width`` columns."""
        return timeline_text(self, width)

    def svg(self) -> str:
        """A picture for a browser."""
        return timeline_svg(self)

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing and Perfetto."""
        return chrome_trace(self)


Record = TypeVar("Record")


def _as(cls: type[Record], record: Any) -> Record:
    return cls(*(getattr(record, field.name) for field in fields(record)))


def schedule(
    name: str, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None, in_flight: int | None = None,
    edges: Iterable[Edge] | None = None, costs: Costs | StageCost | None = None, memory: int | None = None,
    place: Sequence[int] | None = None,
) -> Schedule:  # fmt: skip
    """The compute-only schedule of a name: ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1``, ``auto`` and others.

    ``auto`` is the fastest by ``costs`` among all named schedules and those of a list scheduler. They must need at most
    ``memory`` bytes on any rank and have each stage on the rank in ``place``, if these are given.

    Args:
        name: of a schedule.
        num_stages: of the whole model.
        num_microbatches: of a step.
        num_ranks: by default as many as stages, and half as many for ``interleaved``, ``interleaved-zb`` and ``zb-v``.
        in_flight: a cap on the microbatches of a rank between forward and backward, for ``1f1b``, ``zb-h1`` and
            ``zb-h2``.
        edges: pairs of stages between which messages go, from earlier stages to later ones in forward and back in
            backward; by default a chain.
        costs: seconds and bytes of each stage, for ``auto``.
        memory: bytes of a rank, for ``auto``.
        place: the rank of each stage, for ``auto``.

    Returns:
        The actions of each rank in order, to check and to simulate.

    Raises:
        ShardingError: for an unknown name and for counts that do not fit it.

    Examples:
        >>> import shardc
        >>> [" ".join(map(str, actions)) for actions in shardc.schedule("1f1b", 2, 3).actions]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    names = (*ORDERS, "auto")
    if name not in names:
        hint = did_you_mean(name, names) or f"say one of {', '.join(names)}"
        raise ShardingError("schedule", repr(name), "there is no such schedule", hint)
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "in_flight": in_flight}
    for what, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ShardingError(f"schedule {name}", f"{what}={count!r}", "it counts from 1", f"say {what}=1 or more")
    if num_ranks is None:
        num_ranks = num_stages // 2 if name in CHUNKED else num_stages
    _check_ranks(name, num_stages, num_ranks)
    edges = chain_edges(num_stages) if edges is None else tuple(edges)
    if name != "auto":
        return _as(Schedule, schedule_named(name, edges, num_stages, num_microbatches, num_ranks, in_flight))
    fixed = None if place is None else tuple(place)
    return _as(Schedule, fastest(num_microbatches, num_ranks, edges, costs_for(num_stages, costs), memory, fixed))


def _check_ranks(name: str, num_stages: int, num_ranks: int) -> None:
    what, who = f"{num_stages} stages on {num_ranks} ranks", f"schedule {name}"
    if num_ranks < 1 or num_stages % num_ranks:
        raise ShardingError(who, what, "ranks hold equally many stages", "say num_stages as a multiple of num_ranks")
    if not fits(name, num_stages, num_ranks):
        problem = "it has one stage a rank" if name in LINEAR else "it has two stages a rank"
        others = [other for other in ORDERS if fits(other, num_stages, num_ranks)]
        raise ShardingError(who, what, problem, f"say {' or '.join(others)} for these")
