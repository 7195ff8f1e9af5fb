"""A schedule as text: a line a rank, in the cells of torch.distributed.pipelining's action CSV, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shardc.action import ALL, RECEIVES, SENDS, Action, Edge, Schedule, chain, edge_of
from shardc.error import ShardingError

_CELL = re.compile(r"(\d+)(F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD)(\d*)(?:>(\d+))?")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_STORAGE = re.compile(r"\d+(UNSHARD|RESHARD)")  # FSDP's own: here a gather is part of its stage's computation


def action_text(action: Action) -> str:
    """``2F0``, ``3SEND_B1``, ``0REDUCE_GRAD``; ``0SEND_F1>3`` where the other end is no neighbour.

    torch reads that last one as if nothing stood behind the number.
    """
    kind = "REDUCE_GRAD" if action.kind == "REDUCE" else action.kind
    number = "" if action.microbatch == ALL else str(action.microbatch)
    is_near = action.peer is None or action.peer == _neighbour(action.kind, action.stage)
    return f"{action.stage}{kind}{number}" + ("" if is_near else f">{action.peer}")


def _neighbour(kind: str, stage: int) -> int:
    return stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1


def to_csv(schedule: Schedule) -> str:
    """A line a rank, a cell an action."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv", edges: Iterable[Edge] | None = None) -> Schedule:
    """The schedule that a CSV of torch or of ``to_csv`` says; a ShardingError for a cell that means nothing.

    Empty cells are idle time and left out, as are UNSHARD and RESHARD; a cell of overlapped actions is those actions
    in turn. A stage lies on the rank that computes it. Where ``edges`` are not given they are the chain of stages and
    whatever else the messages name.
    """
    if not isinstance(text, str):
        problem, remedy = "a CSV is text", "give what to_csv() returns, or Path(file).read_text()"
        raise ShardingError("schedule", f"of type {type(text).__name__}", problem, remedy)
    rows = [tuple(_actions(line, rank)) for rank, line in enumerate(text.strip("\n").split("\n"))]
    named = {edge_of(action) for row in rows for action in row if action.kind in (*SENDS, *RECEIVES)}
    place = _place(rows)
    near = chain(len(place))
    wanted = (*near, *sorted(named - set(near), key=_edge_order)) if edges is None else tuple(edges)
    count = 1 + max((action.microbatch for row in rows for action in row), default=ALL)
    return Schedule(name, tuple(rows), place, count, wanted)


def _edge_order(edge: Edge) -> tuple[int, int, int]:
    return "FB".index(edge.phase), edge.source, edge.target


def _actions(line: str, rank: int) -> Iterator[Action]:
    for cell in line.split(","):
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in overlapped[1].split(";") if overlapped else [cell]:
            if text.strip() and not _STORAGE.fullmatch(text.strip()):
                yield parse_action(text.strip(), f"rank {rank}")


def parse_action(text: str, who: str = "action") -> Action:
    """The reverse of ``action_text``."""
    match = _CELL.fullmatch(text)
    if match is None or (match[2] != "REDUCE_GRAD" and not match[3]):
        remedy = "write stage, kind and microbatch, as in 2F0, 3SEND_B1 or 0SEND_F1>3"
        raise ShardingError(f"schedule, {who}", repr(text), "it is no action", remedy)
    stage, kind = int(match[1]), match[2].removesuffix("_GRAD")
    if kind not in (*SENDS, *RECEIVES):
        return Action(kind, stage, int(match[3]) if match[3] else ALL)
    return Action(kind, stage, int(match[3]), int(match[4]) if match[4] else _neighbour(kind, stage))


def _place(rows: list[tuple[Action, ...]]) -> tuple[int, ...]:
    homes = {action.stage: rank for rank, row in enumerate(rows) for action in row if action.kind == "F"}
    if not homes or sorted(homes) != list(range(len(homes))):
        what = f"forward of the stages {sorted(homes)}"
        raise ShardingError("schedule", what, "stages are numbered from 0 without a gap", "name every stage's F")
    return tuple(homes[stage] for stage in sorted(homes))
