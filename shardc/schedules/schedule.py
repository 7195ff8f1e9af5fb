"""What each rank of a pipeline does, in order: actions, the edges that messages go over, and a schedule of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardc.language.errors import ShardingError

if TYPE_CHECKING:
    from shardc.schedules.simulate import Costs, StageCost
    from shardc.schedules.timeline import Timeline

ActionPhase = Literal["F", "B"]

COMPUTE = ("F", "I", "W", "B")
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
KINDS = (*COMPUTE, *SENDS, *RECEIVES, "REDUCE")
ALL = -1  # the microbatch of what comes once a step: a REDUCE, or a message after the last microbatch


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does for one stage and one microbatch.

    ``F`` forward; ``B`` backward, which is ``I`` (gradients of the stage's inputs) and ``W`` (gradients of its weights)
    in one; ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` move what one stage makes for another in forward and in
    backward; ``REDUCE`` sums the stage's gradients over ranks that share its weights. ``peer`` is the stage at the
    other end of a message.
    """

    kind: str
    stage: int
    microbatch: int = ALL
    peer: int | None = None

    def __str__(self) -> str:

        return action_text(self)

    @property
    def phase(self) -> ActionPhase:
        """Of which kind of message: ``F`` of activations, ``B`` of gradients."""
        return "F" if self.kind in ("F", "SEND_F", "RECV_F") else "B"

    @property
    def makes_messages(self) -> bool:
        """Whether other stages may wait for what it makes: a W, a message and a REDUCE make nothing for them."""
        return self.kind in ("F", "I", "B")


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage ``source`` makes in forward (``F``) or backward (``B``) what stage ``target`` reads there: one message."""

    source: int
    target: int
    phase: ActionPhase

    def send(self, microbatch: int) -> Action:
        """What the rank of ``source`` does."""
        return Action(f"SEND_{self.phase}", self.source, microbatch, self.target)

    def receive(self, microbatch: int) -> Action:
        """What the rank of ``target`` does."""
        return Action(f"RECV_{self.phase}", self.target, microbatch, self.source)


def edge_of(message: Action) -> Edge:
    """The edge that a SEND or a RECV serves."""
    assert message.peer is not None, message
    ends = (message.stage, message.peer) if message.kind in SENDS else (message.peer, message.stage)
    return Edge(*ends, message.phase)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Each stage's activations go to the next one, its gradients to the one before."""
    forward = [Edge(stage, stage + 1, "F") for stage in range(num_stages - 1)]
    return (*forward, *(Edge(edge.target, edge.source, "B") for edge in forward))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank in order, and which rank holds which stage.

    ``place[stage]`` is a rank. Over ``edges`` goes one message a microbatch, with all values of that edge; between two
    stages of one rank none is sent. A schedule is *compute-only* until ``with_messages`` writes the messages into it.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]
    num_microbatches: int
    edges: tuple[Edge, ...]

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return len(self.place)

    @property
    def num_ranks(self) -> int:
        """Of the pipeline axis."""
        return len(self.actions)

    @property
    def is_forward_only(self) -> bool:
        """Whether it has no backward."""
        return all(action.phase == "F" for _, action in self.walk())

    @property
    def has_messages(self) -> bool:
        """Whether they are written into it, or whether there are none to write."""
        sent = any(action.kind in SENDS for _, action in self.walk())
        return sent or not self.crossing()

    def stages_on(self, rank: int) -> list[int]:
        """The stages that lie on a rank."""
        return [stage for stage, home in enumerate(self.place) if home == rank]

    def walk(self) -> Iterator[tuple[int, Action]]:
        """Every rank's actions, rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.actions) for action in row)

    def crossing(self) -> tuple[Edge, ...]:
        """The edges between ranks, forward only where the schedule is."""
        phases = ("F",) if self.is_forward_only else ("F", "B")
        return tuple(
            edge for edge in self.edges if edge.phase in phases and self.place[edge.source] != self.place[edge.target]
        )

    def compute_only(self) -> Schedule:
        """The same order without messages and reductions."""
        return self._keep(lambda action: action.kind in COMPUTE)

    def forward_only(self) -> Schedule:
        """Its forward part, in the same order: how a model is evaluated under any schedule."""
        return self._keep(lambda action: action.phase == "F")

    def with_messages(self, edges: Iterable[Edge] | None = None, costs: Costs | None = None) -> Schedule:
        """The same computation with every message sent once it is made, and received in the order it was sent.

        ``costs`` say when which action ends; without them all take equally long. Raises a ShardingError where the
        order of computation is itself impossible.
        """
        from shardc.schedules.simulate import with_messages

        return with_messages(self if edges is None else replace(self, edges=tuple(edges)), costs)

    def with_reductions(self) -> Schedule:
        """With a REDUCE of each stage at the end of its rank, by stage number."""
        rows = [
            (*row, *(Action("REDUCE", stage) for stage in self.stages_on(rank)))
            for rank, row in enumerate(self.actions)
        ]
        return replace(self, actions=tuple(rows))

    def check(self) -> Schedule:
        """Itself, proven: it is complete, ends, and every message meets its receiver. A ShardingError otherwise."""
        from shardc.schedules.check import check

        check(self)
        return self

    def simulate(self, costs: Costs | StageCost | None = None) -> Timeline:
        """When everything happens and how many bytes it takes; without costs F, I and W take one second each."""
        from shardc.schedules.simulate import simulate

        return simulate(self, costs)

    def to_csv(self) -> str:
        """A line a rank, as torch.distributed.pipelining reads it."""
        return to_csv(self)

    @staticmethod
    def from_csv(text: str, name: str = "csv", edges: Iterable[Edge] | None = None) -> Schedule:
        """What ``to_csv`` or torch wrote; see ``schedule_text.from_csv``."""
        return from_csv(text, name, edges)

    def _keep(self, is_kept: Callable[[Action], bool]) -> Schedule:
        return replace(self, actions=tuple(tuple(filter(is_kept, row)) for row in self.actions))


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
