"""The proof that a schedule ends and that every message meets its receiver, before any of it runs.

In order: every action is one that its rank can do; every stage does every microbatch once; every message between ranks
is sent once and received once; on each channel, a pair of ranks in one direction, sends and receives come in one order,
since messages bear no names; no ranks wait for each other in a circle, even where a send waits until its receive is
reached; and nothing is read that does not live then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.schedule import ALL, COMPUTE, KINDS, RECEIVES, SENDS, Action, Edge, Schedule, edge_of
from shardc.schedules.simulate import edges_into, peak_bytes


def check(schedule: Schedule) -> None:
    """Nothing for a schedule that is right; a ShardingError that names what is not, ranks and actions and the circle.

    A compute-only schedule is right if it is once messages are written into it.
    """
    raise_all(list(_strangers(schedule)))
    raise_all([*_incomplete(schedule), *_reduced_wrongly(schedule)])
    if schedule.has_messages:
        raise_all(list(_unpaired(schedule)))
        raise_all(list(_out_of_order(schedule)))
    if not nx.is_directed_acyclic_graph(rendezvous_graph(schedule)):
        raise _waiting(schedule, _circle(data_graph(schedule)) or _circle(rendezvous_graph(schedule)))
    peak_bytes(schedule)


def _strangers(schedule: Schedule) -> Iterator[ShardingError]:
    """Actions that cannot be: of no stage, of no microbatch, on another rank than their stage, over no edge."""
    crossing = set(schedule.crossing())
    for rank, action in schedule.walk():
        problem = _why_strange(schedule, rank, action, crossing)
        if problem:
            remedy = "take it out, or say the place, the edges and num_microbatches that it belongs to"
            yield ShardingError(f"schedule {schedule.name}, rank {rank}", str(action), problem, remedy)


def _why_strange(schedule: Schedule, rank: int, action: Action, crossing: set[Edge]) -> str:
    if action.kind not in KINDS:
        return "there is no such kind of action"
    if not 0 <= action.stage < schedule.num_stages:
        return f"there are {schedule.num_stages} stages"
    if schedule.place[action.stage] != rank:
        return f"stage {action.stage} lies on rank {schedule.place[action.stage]}"
    if (action.microbatch == ALL) != (
        action.kind == "REDUCE"
    ) or not ALL <= action.microbatch < schedule.num_microbatches:
        return f"there are {schedule.num_microbatches} microbatches, and all are reduced at once"
    if action.kind not in (*SENDS, *RECEIVES):
        return "only messages have a peer" if action.peer is not None else ""
    return "" if action.peer is not None and edge_of(action) in crossing else "no edge between ranks is such"


def _incomplete(schedule: Schedule) -> Iterator[ShardingError]:
    """Stages that do not do every microbatch once: F, and B or I and W."""
    counted = Counter((action.kind, action.stage, action.microbatch) for _, action in schedule.walk())
    ways = [{"F": 1}] if schedule.is_forward_only else [{"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}]
    for stage, rank in enumerate(schedule.place):
        for microbatch in range(schedule.num_microbatches):
            found = {kind: counted[kind, stage, microbatch] for kind in COMPUTE}
            if {kind: count for kind, count in found.items() if count} not in ways:
                what = ", ".join(f"{count} {kind}" for kind, count in found.items() if count) or "nothing"
                who = f"schedule {schedule.name}, rank {rank}, stage {stage}, microbatch {microbatch}"
                wanted = " or ".join(" and ".join(f"one {kind}" for kind in way) for way in ways)
                yield ShardingError(who, what, "every microbatch goes through every stage once", f"give it {wanted}")


def _reduced_wrongly(schedule: Schedule) -> Iterator[ShardingError]:
    """Reductions of which there is not one for each stage, or that come before a gradient is whole."""
    reduced = Counter(action.stage for _, action in schedule.walk() if action.kind == "REDUCE")
    for stage, rank in enumerate(schedule.place) if reduced else ():
        row = [action.kind for action in schedule.actions[rank] if action.stage == stage]
        if reduced[stage] != 1 or any(kind in ("W", "B", "I") for kind in row[row.index("REDUCE") :]):
            what = f"{reduced[stage]} REDUCE of stage {stage}"
            remedy = "call with_reductions() on a schedule that has none"
            problem = "each stage has one, behind its last backward"
            yield ShardingError(f"schedule {schedule.name}, rank {rank}", what, problem, remedy)


def _unpaired(schedule: Schedule) -> Iterator[ShardingError]:
    """Messages that are not sent once and received once."""
    counted = Counter(action for _, action in schedule.walk() if action.kind in (*SENDS, *RECEIVES))
    for edge in schedule.crossing():
        for microbatch in range(schedule.num_microbatches):
            ends = edge.send(microbatch), edge.receive(microbatch)
            if [counted[end] for end in ends] != [1, 1]:
                what = f"{ends[0]} {counted[ends[0]]} times, {ends[1]} {counted[ends[1]]} times"
                ranks = f"rank {schedule.place[edge.source]} to rank {schedule.place[edge.target]}"
                remedy = "call with_messages(): it writes all of them anew"
                yield ShardingError(f"schedule {schedule.name}, {ranks}", what, "each comes once", remedy)


def _out_of_order(schedule: Schedule) -> Iterator[ShardingError]:
    """Channels that are read in another order than they are written."""
    orders: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}
    for rank, action in schedule.walk():
        if action.kind in SENDS:
            orders.setdefault((rank, _peer_rank(schedule, action)), ([], []))[0].append(action)
        elif action.kind in RECEIVES:
            orders.setdefault((_peer_rank(schedule, action), rank), ([], []))[1].append(action)
    for (source, target), (sends, receives) in sorted(orders.items()):
        expected = [edge_of(send).receive(send.microbatch) for send in sends]
        for at, (send, wanted, receive) in enumerate(zip(sends, expected, receives, strict=True)):
            if wanted != receive:
                who = f"schedule {schedule.name}, rank {source} to rank {target}, message {at}"
                what = f"{send} is received as {receive}"
                problem = "messages of a channel come in the order in which they are sent"
                yield ShardingError(who, what, problem, "receive in the order of the sends, or call with_messages()")
                break


def _peer_rank(schedule: Schedule, message: Action) -> int:
    assert message.peer is not None
    return schedule.place[message.peer]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A send and its receive as one: neither is done before both ranks are there."""

    send: Action
    receive: Action

    def __str__(self) -> str:
        return f"{self.send} = {self.receive}"


def data_graph(schedule: Schedule) -> nx.DiGraph[Hashable]:
    """What must end before what: each rank's order, and who makes what others read; a message's two ends are two."""
    return _graph(schedule, {})


def rendezvous_graph(schedule: Schedule) -> nx.DiGraph[Hashable]:
    """The same with the two ends of each message as one."""
    sends = [action for _, action in schedule.walk() if action.kind in SENDS]
    meetings = [Meeting(send, edge_of(send).receive(send.microbatch)) for send in sends]
    return _graph(schedule, {end: meeting for meeting in meetings for end in (meeting.send, meeting.receive)})


def _graph(schedule: Schedule, contracted: dict[Action, Meeting]) -> nx.DiGraph[Hashable]:
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    for row in schedule.actions:
        nodes = [contracted.get(action, action) for action in row]
        graph.add_nodes_from(nodes)
        graph.add_edges_from(pairwise(nodes))
    for before, after in _data(schedule):
        ends = contracted.get(before, before), contracted.get(after, after)
        graph.add_edges_from([ends] if ends[0] != ends[1] else [])
    return graph


def _data(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Each action with each that makes what it reads, over messages where these are written."""
    makers: dict[tuple[int, str, int], Action] = {
        (action.stage, action.phase, action.microbatch): action
        for _, action in schedule.walk()
        if action.makes_messages
    }
    entering = edges_into(schedule.edges)
    crossing = set(schedule.crossing()) if schedule.has_messages else set()
    for _, action in schedule.walk():
        here = action.stage, "B", action.microbatch
        if action.kind == "W":
            yield makers[here], action
        if action.kind in ("I", "B"):
            yield makers[action.stage, "F", action.microbatch], action
        for edge in entering.get((action.stage, action.phase), ()) if action.makes_messages else ():
            maker = makers[edge.source, edge.phase, action.microbatch]
            yield from _over(edge, maker, action) if edge in crossing else [(maker, action)]


def _over(edge: Edge, maker: Action, reader: Action) -> Iterable[tuple[Action, Action]]:
    return pairwise((maker, edge.send(maker.microbatch), edge.receive(maker.microbatch), reader))


def _circle(graph: nx.DiGraph[Hashable]) -> list[Hashable]:
    """Nodes of which each waits for the one before, or none."""
    try:
        return [node for node, *_ in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return []


def _waiting(schedule: Schedule, circle: list[Hashable]) -> ShardingError:
    lines = [f"{_ranks(schedule, node)}: {node}" for node in (*circle, circle[0])]
    remedy = "order the actions otherwise, or let with_messages() say where messages stand"
    what = "\n    before ".join(lines)
    return ShardingError(f"schedule {schedule.name}", what, "these wait for each other for ever", remedy)


def _ranks(schedule: Schedule, node: Hashable) -> str:
    ends = (node.send, node.receive) if isinstance(node, Meeting) else (node,)
    ranks = [f"rank {schedule.place[end.stage]}" for end in ends if isinstance(end, Action)]
    return " and ".join(ranks)
