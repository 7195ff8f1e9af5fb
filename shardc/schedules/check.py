"""Proves that a schedule is complete and ends, and that every message meets its receiver, before any of it runs.

The checks, in order. Every action is one that its rank can run. Every stage computes every microbatch once. Every
message between ranks is sent once and received once. On each channel, an ordered pair of ranks, receives come in the
order of the sends, since messages have no names. No ranks wait for each other in a circle, even if a send waits for
its receive. No action reads a value that is not alive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.schedule import (
    ALL,
    COMPUTE,
    KINDS,
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Schedule,
    edge_of,
    edges_into,
    operands,
)
from shardc.schedules.simulate import peak_bytes

if TYPE_CHECKING:
    import networkx as nx


def check(schedule: Schedule) -> None:
    """Raise a ShardingError that names the ranks and actions that are wrong, or the circle in which ranks wait.

    A compute-only schedule is checked as if its messages were inserted.
    """
    import networkx as nx  # programs without a pipeline never need it

    crossing, impossible = set(schedule.crossing()), []
    remedy = "take it out, or say the place, the edges and num_microbatches that it belongs to"
    for rank, action in schedule.walk():
        if problem := _why_impossible(schedule, rank, action, crossing):
            impossible.append(ShardingError(f"schedule {schedule.name}, rank {rank}", str(action), problem, remedy))
    raise_all(impossible)
    raise_all([*_incomplete_stages(schedule), *_wrong_reductions(schedule)])
    if schedule.has_messages:
        raise_all(list(_unpaired_messages(schedule)))
        raise_all(list(_unordered_channels(schedule)))
    sends = [action for _, action in schedule.walk() if action.kind in SENDS]
    meetings = [Rendezvous(send, edge_of(send).receive(send.microbatch)) for send in sends]
    # the order in which actions must end, if every send waits for its receive
    rendezvous = _graph(schedule, {end: meeting for meeting in meetings for end in (meeting.send, meeting.receive)})
    if not nx.is_directed_acyclic_graph(rendezvous):
        data = _graph(schedule, {})
        circle = [node for node, *_ in nx.find_cycle(rendezvous if nx.is_directed_acyclic_graph(data) else data)]
        what = "\n    before ".join(f"{_ranks(schedule, node)}: {node}" for node in (*circle, circle[0]))
        remedy = "order the actions otherwise, or let with_messages() say where messages stand"
        raise ShardingError(f"schedule {schedule.name}", what, "these wait for each other for ever", remedy)
    peak_bytes(schedule)


def _why_impossible(schedule: Schedule, rank: int, action: Action, crossing: set[Edge]) -> str:
    if action.kind not in KINDS:
        return "there is no such kind of action"
    if not 0 <= action.stage < schedule.num_stages:
        return f"there are {schedule.num_stages} stages"
    if schedule.place[action.stage] != rank:
        return f"stage {action.stage} is on rank {schedule.place[action.stage]}"
    is_for_all, is_reduction = action.microbatch == ALL, action.kind == "REDUCE"
    if is_for_all != is_reduction or not ALL <= action.microbatch < schedule.num_microbatches:
        return f"there are {schedule.num_microbatches} microbatches, and all are reduced at once"
    if action.kind not in (*SENDS, *RECEIVES):
        return "only messages have a peer" if action.peer is not None else ""
    has_edge = action.peer is not None and edge_of(action) in crossing
    return "" if has_edge else "there is no such edge between ranks"


def _incomplete_stages(schedule: Schedule) -> Iterator[ShardingError]:
    """An error for each microbatch of each stage that does not have one F, and one B or one I and one W."""
    counts = Counter((action.kind, action.stage, action.microbatch) for _, action in schedule.walk())
    allowed = [{"F": 1}] if schedule.is_forward_only else [{"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}]
    for stage, rank in enumerate(schedule.place):
        for microbatch in range(schedule.num_microbatches):
            present = {kind: count for kind in COMPUTE if (count := counts[kind, stage, microbatch])}
            if present not in allowed:
                who = f"schedule {schedule.name}, rank {rank}, stage {stage}, microbatch {microbatch}"
                what = ", ".join(f"{count} {kind}" for kind, count in present.items()) or "nothing"
                remedy = "give it " + " or ".join(" and ".join(f"one {kind}" for kind in way) for way in allowed)
                yield ShardingError(who, what, "every microbatch goes through every stage once", remedy)


def _wrong_reductions(schedule: Schedule) -> Iterator[ShardingError]:
    """An error for each stage that does not have exactly one REDUCE, or has it before its last backward."""
    counts = Counter(action.stage for _, action in schedule.walk() if action.kind == "REDUCE")
    for stage, rank in enumerate(schedule.place) if counts else ():
        row = [action.kind for action in schedule.actions[rank] if action.stage == stage]
        if counts[stage] != 1 or any(kind in ("W", "B", "I") for kind in row[row.index("REDUCE") :]):
            who, what = f"schedule {schedule.name}, rank {rank}", f"{counts[stage]} REDUCE of stage {stage}"
            remedy = "call with_reductions() on a schedule that has none"
            yield ShardingError(who, what, "each stage has one, after its last backward", remedy)


def _unpaired_messages(schedule: Schedule) -> Iterator[ShardingError]:
    """An error for each message that is not sent once and received once."""
    counts = Counter(action for _, action in schedule.walk() if action.kind in (*SENDS, *RECEIVES))
    remedy = "call with_messages(): it inserts all of them anew"
    for edge, microbatch in product(schedule.crossing(), range(schedule.num_microbatches)):
        send, receive = edge.send(microbatch), edge.receive(microbatch)
        if (counts[send], counts[receive]) != (1, 1):
            what = f"{send} {counts[send]} times, {receive} {counts[receive]} times"
            ranks = f"rank {schedule.place[edge.source]} to rank {schedule.place[edge.target]}"
            yield ShardingError(f"schedule {schedule.name}, {ranks}", what, "each comes once", remedy)


def _unordered_channels(schedule: Schedule) -> Iterator[ShardingError]:
    """An error for each channel whose receives come in another order than its sends."""
    sends, receives = defaultdict[tuple[int, int], list[Action]](list), defaultdict[tuple[int, int], list[Action]](list)
    for rank, action in schedule.walk():
        if action.kind in SENDS:
            sends[rank, schedule.place[edge_of(action).target]].append(action)
        elif action.kind in RECEIVES:
            receives[schedule.place[edge_of(action).source], rank].append(action)
    for source, target in sorted(sends):
        for at, (send, receive) in enumerate(zip(sends[source, target], receives[source, target], strict=True)):
            if edge_of(send).receive(send.microbatch) != receive:
                who = f"schedule {schedule.name}, rank {source} to rank {target}, message {at}"
                problem = "messages of a channel come in the order in which they are sent"
                remedy = "receive in the order of the sends, or call with_messages()"
                yield ShardingError(who, f"{send} is received as {receive}", problem, remedy)
                break


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A send and its receive as one event: neither ends before both ranks have reached it."""

    send: Action
    receive: Action

    def __str__(self) -> str:
        return f"{self.send} = {self.receive}"


def _graph(schedule: Schedule, contracted: dict[Action, Rendezvous]) -> nx.DiGraph[Hashable]:
    """Edges along the order of each rank and from each result to its reader; ``contracted`` actions become one node."""
    import networkx as nx

    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    for row in schedule.actions:
        nodes = [contracted.get(action, action) for action in row]
        graph.add_nodes_from(nodes)
        graph.add_edges_from(pairwise(nodes))
    for before, after in _dependencies(schedule):
        ends = contracted.get(before, before), contracted.get(after, after)
        graph.add_edges_from([ends] if ends[0] != ends[1] else [])
    return graph


def _dependencies(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Pairs of actions that depend on each other: the maker of a result, its messages if inserted, and its reader."""
    computations = [action for _, action in schedule.walk() if action.kind in COMPUTE]
    makers = {(each.stage, each.phase, each.microbatch): each for each in computations if each.makes_messages}
    entering = edges_into(schedule.edges)
    crossing = set(schedule.crossing()) if schedule.has_messages else set()
    for action in computations:
        for result, edge in operands(action, entering):
            ends = [edge.send(action.microbatch), edge.receive(action.microbatch)] if edge and edge in crossing else []
            yield from pairwise((makers[result], *ends, action))


def _ranks(schedule: Schedule, node: Hashable) -> str:
    ends = (node.send, node.receive) if isinstance(node, Rendezvous) else (node,)
    return " and ".join(f"rank {schedule.place[end.stage]}" for end in ends if isinstance(end, Action))
