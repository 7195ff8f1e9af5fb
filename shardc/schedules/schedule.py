"""A pipeline schedule as pure data: the actions of each rank in order, the edges for messages, and its CSV form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from shardc.language.errors import ShardingError

ActionPhase = Literal["F", "B"]

COMPUTE = ("F", "I", "W", "B")
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
KINDS = (*COMPUTE, *SENDS, *RECEIVES, "REDUCE")
ALL = -1  # the microbatch of an action that runs once a step: a REDUCE, or a message after the last microbatch


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one stage and one microbatch.

    ``F``: forward. ``B``: backward, which is ``I`` (gradients of the stage's inputs) followed by ``W`` (gradients of
    its weights). ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``: move activations or gradients between stages; ``peer``
    is the stage at the other end. ``REDUCE``: sums the stage's gradients over the ranks that share its weights.
    """

    kind: str
    stage: int
    microbatch: int = ALL
    peer: int | None = None

    def __str__(self) -> str:
        """``2F0``, ``3SEND_B1``, ``0REDUCE_GRAD``; ``0SEND_F1>3`` where the peer is not the neighbouring stage.

        torch reads the first three forms; in the last one it ignores the text after the number.
        """
        kind = "REDUCE_GRAD" if self.kind == "REDUCE" else self.kind
        number = "" if self.microbatch == ALL else str(self.microbatch)
        is_near = self.peer is None or self.peer == _neighbour(self.kind, self.stage)
        return f"{self.stage}{kind}{number}" + ("" if is_near else f">{self.peer}")

    @property
    def phase(self) -> ActionPhase:
        """``F`` for forward and messages of activations, ``B`` for backward and messages of gradients."""
        return "F" if self.kind in ("F", "SEND_F", "RECV_F") else "B"

    @property
    def makes_messages(self) -> bool:
        """Whether other stages may wait for its result. Nothing waits for a W, a message or a REDUCE."""
        return self.kind in ("F", "I", "B")


def _neighbour(kind: str, stage: int) -> int:
    return stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage ``target`` reads results of stage ``source`` in forward (``F``) or backward (``B``).

    Each microbatch sends one message over an edge, with all values that cross there.
    """

    source: int
    target: int
    phase: ActionPhase

    def send(self, microbatch: int) -> Action:
        """The SEND on the rank of ``source``."""
        return Action(f"SEND_{self.phase}", self.source, microbatch, self.target)

    def receive(self, microbatch: int) -> Action:
        """The RECV on the rank of ``target``."""
        return Action(f"RECV_{self.phase}", self.target, microbatch, self.source)


def edge_of(message: Action) -> Edge:
    """The edge of a SEND or a RECV."""
    assert message.peer is not None, message
    ends = (message.stage, message.peer) if message.kind in SENDS else (message.peer, message.stage)
    return Edge(*ends, message.phase)


def chain_edges(num_stages: int) -> tuple[Edge, ...]:
    """Edges of a chain: activations go to the next stage, gradients to the previous one."""
    forward = [Edge(stage, stage + 1, "F") for stage in range(num_stages - 1)]
    return (*forward, *(Edge(edge.target, edge.source, "B") for edge in forward))


EdgesByStage = dict[tuple[int, str], list[Edge]]  # by stage and phase


def edges_from(edges: Iterable[Edge]) -> EdgesByStage:
    """The edges that leave each stage in each phase."""
    leaving: EdgesByStage = {}
    for edge in edges:
        leaving.setdefault((edge.source, edge.phase), []).append(edge)
    return leaving


def edges_into(edges: Iterable[Edge]) -> EdgesByStage:
    """The edges that enter each stage in each phase."""
    entering: EdgesByStage = {}
    for edge in edges:
        entering.setdefault((edge.target, edge.phase), []).append(edge)
    return entering


Result = tuple[int, ActionPhase, int]  # stage, phase and microbatch


def operands(action: Action, entering: EdgesByStage) -> Iterator[tuple[Result, Edge | None]]:
    """The results that a computation reads, each with its edge; None for a result of its own stage."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        yield (stage, "B", microbatch), None
        return
    if action.phase == "B":
        yield (stage, "F", microbatch), None
    for edge in entering.get((stage, action.phase), ()):
        yield (edge.source, edge.phase, microbatch), edge


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank in order, and the rank of each stage.

    ``place[stage]`` is a rank. ``edges`` are the pairs of stages that exchange values; two stages of one rank do so
    without a message. A schedule is *compute-only* until ``with_messages`` inserts its sends and receives.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]
    num_microbatches: int
    edges: tuple[Edge, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks together."""
        return len(self.place)

    @property
    def num_ranks(self) -> int:
        """The number of ranks along the pipeline axis."""
        return len(self.actions)

    @property
    def is_forward_only(self) -> bool:
        """Whether it has no backward."""
        return all(action.phase == "F" for _, action in self.walk())

    @property
    def has_messages(self) -> bool:
        """Whether its messages are inserted, or it needs none."""
        return any(action.kind in (*SENDS, *RECEIVES) for _, action in self.walk()) or not self.crossing()

    def stages_on(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, home in enumerate(self.place) if home == rank]

    def walk(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.actions) for action in row)

    def is_crossing(self, edge: Edge) -> bool:
        """Whether the two stages of an edge are on different ranks, so that it needs messages."""
        return self.place[edge.source] != self.place[edge.target]

    def crossing(self) -> tuple[Edge, ...]:
        """The edges between ranks; only those of forward if the schedule has no backward."""
        phases = ("F",) if self.is_forward_only else ("F", "B")
        return tuple(edge for edge in self.edges if edge.phase in phases and self.is_crossing(edge))

    def compute_only(self) -> Self:
        """The same order without messages and reductions."""
        return self._filtered(lambda action: action.kind in COMPUTE)

    def forward_only(self) -> Self:
        """The forward part in the same order, for evaluating a model."""
        return self._filtered(lambda action: action.phase == "F")

    def _filtered(self, is_kept: Callable[[Action], bool]) -> Self:
        return replace(self, actions=tuple(tuple(filter(is_kept, row)) for row in self.actions))

    def with_reductions(self) -> Self:
        """The schedule with the REDUCE of each stage at the end of its rank's actions, in order of stages."""
        ends = [tuple(Action("REDUCE", stage) for stage in self.stages_on(rank)) for rank in range(self.num_ranks)]
        return replace(self, actions=tuple((*row, *end) for row, end in zip(self.actions, ends, strict=True)))


# The CSV form of torch.distributed.pipelining.

_CELL = re.compile(r"(\d+)(F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD)(\d*)(?:>(\d+))?")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_STORAGE = re.compile(r"\d+(UNSHARD|RESHARD)")  # FSDP's gathers, which are part of a stage's computation here


def to_csv(schedule: Schedule) -> str:
    """One line for each rank, one cell for each action."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv", edges: Iterable[Edge] | None = None) -> Schedule:
    """Read a schedule from a CSV that torch or ``to_csv`` wrote. Raises a ShardingError for a cell that is no action.

    Empty cells (idle time), UNSHARD and RESHARD are left out. A cell of overlapped actions becomes these actions one
    after the other. A stage is on the rank that computes it. ``edges`` default to the chain of stages and any other
    edges of the messages.
    """
    if not isinstance(text, str):
        problem, remedy = "a CSV is text", "give what to_csv() returns, or Path(file).read_text()"
        raise ShardingError("schedule", f"of type {type(text).__name__}", problem, remedy)
    rows = [tuple(_actions(line, rank)) for rank, line in enumerate(text.strip("\n").split("\n"))]
    homes = {action.stage: rank for rank, row in enumerate(rows) for action in row if action.kind == "F"}
    if not homes or sorted(homes) != list(range(len(homes))):
        what = f"forward of the stages {sorted(homes)}"
        raise ShardingError("schedule", what, "stages are numbered from 0 without a gap", "name every stage's F")
    place = tuple(homes[stage] for stage in sorted(homes))
    if edges is None:
        used = {edge_of(action) for row in rows for action in row if action.kind in (*SENDS, *RECEIVES)}
        chain = chain_edges(len(place))
        others = sorted(used - set(chain), key=lambda edge: ("FB".index(edge.phase), edge.source, edge.target))
        edges = (*chain, *others)
    count = 1 + max((action.microbatch for row in rows for action in row), default=ALL)
    return Schedule(name, tuple(rows), place, count, tuple(edges))


def _actions(line: str, rank: int) -> Iterator[Action]:
    for cell in line.split(","):
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in overlapped[1].split(";") if overlapped else [cell]:
            if text.strip() and not _STORAGE.fullmatch(text.strip()):
                yield parse_action(text.strip(), f"rank {rank}")


def parse_action(text: str, who: str = "action") -> Action:
    """The action in a cell, as ``str(action)`` writes it. Raises a ShardingError for any other text."""
    match = _CELL.fullmatch(text)
    if match is None or (match[2] != "REDUCE_GRAD" and not match[3]):
        remedy = "write stage, kind and microbatch, as in 2F0, 3SEND_B1 or 0SEND_F1>3"
        raise ShardingError(f"schedule, {who}", repr(text), "it is no action", remedy)
    stage, kind = int(match[1]), match[2].removesuffix("_GRAD")
    if kind not in (*SENDS, *RECEIVES):
        return Action(kind, stage, int(match[3]) if match[3] else ALL)
    return Action(kind, stage, int(match[3]), int(match[4]) if match[4] else _neighbour(kind, stage))
