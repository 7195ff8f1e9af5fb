"""The cheapest moves of axes from one state to another: a search from both ends.

From the source a state is reached by moves, from the target by moves undone; of each state the cheapest way is kept.
The two meet where one state is reached from both ends, or where two states cut every dim into as many pieces: then one
permute leads from the first to the second.

An axis that neither end uses may share the work: each of its ranks moves a piece, and the pieces are joined at the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .move_axes import Move, Space, State, moves_from, moves_into


class Way(NamedTuple):
    """Moves from one state to another, and what they cost together."""

    moves: tuple[Move, ...]
    cost: int


def cheapest_way(space: Space) -> Way | None:
    """The cheapest moves from the source to the target; None if no way divides evenly."""
    there, back = _Side(space, space.src, is_forward=True), _Side(space, space.dst, is_forward=False)
    best: Way | None = None
    least: float = math.inf
    while min(there.next_cost, back.next_cost) < least:
        side, other = (there, back) if there.next_cost <= back.next_cost else (back, there)
        for state, found in side.close_next(other):
            one, two = (state, found) if side is there else (found, state)
            is_one = one == two and not space.reorders
            cost = there.closed[one] + back.closed[two] + (0 if is_one else space.local(one) + space.latency)
            if cost < least:
                permute = () if is_one else (Move("collective_permute", (), (), one, two),)
                best, least = Way((*there.way(one), *permute, *back.way(two)), cost), cost
    return best


def may_be_shared(space: Space, way: Way) -> bool:
    """Whether an axis that neither end uses might pay: to join its pieces costs up to the smallest value on the way.

    What is moved there without changing its size, by permutes and all_to_alls, must cost more than that.
    """
    states = [space.src, *(move.after for move in way.moves)]
    smallest = min(map(space.local, states))
    moved = sum(
        space.local(move.before) - (space.local(move.before) // space.pieces(move.atoms) if move.atoms else 0)
        for move in way.moves
        if move.kind in ("all_to_all", "collective_permute")
    )
    return moved > smallest + space.latency


@dataclass
class _Side:
    """One end's search (A*): next is the open state with the least cost so far and still to come.

    ``closed``: states with their final cost. ``firsts``: the first closed state of each count of pieces, which is the
    cheapest of its kind. ``reached``: the least known cost and the last move of the way to a state. Among equals the
    state that was reached last is next, and of one state's moves the first in order.
    """

    space: Space
    start: State
    is_forward: bool
    closed: dict[State, int] = field(default_factory=dict)
    firsts: dict[object, State] = field(default_factory=dict)
    reached: dict[State, tuple[int, Move | None]] = field(default_factory=dict)
    heap: list[tuple[int, int, State]] = field(default_factory=list)
    pushed: int = 0

    def __post_init__(self) -> None:
        self._reach(self.start, 0, None)

    @property
    def next_cost(self) -> float:
        """No way through a state that is still open costs less."""
        return self.heap[0][0] if self.heap else math.inf

    def close_next(self, other: _Side) -> Iterator[tuple[State, State]]:
        """Close the next state; its meetings with states of the other end: itself, and one that is a permute away."""
        _, _, state = heapq.heappop(self.heap)
        if state in self.closed:
            return
        cost = self.closed[state] = self.reached[state][0]
        edges = moves_from(self.space, state) if self.is_forward else moves_into(self.space, state)
        for move, more in reversed(list(edges)):
            self._reach(move.after if self.is_forward else move.before, cost + more, move)
        counts = self.space.counts(state)
        if state in other.closed:
            yield state, state
        if counts in other.firsts and self.firsts.setdefault(counts, state) == state:
            yield state, other.firsts[counts]
        self.firsts.setdefault(counts, state)

    def way(self, state: State) -> tuple[Move, ...]:
        """The moves between this end and a state, in the order of execution."""
        moves: list[Move] = []
        while (move := self.reached[state][1]) is not None:
            moves.append(move)
            state = move.before if self.is_forward else move.after
        return tuple(reversed(moves)) if self.is_forward else tuple(moves)

    def _reach(self, state: State, cost: int, move: Move | None) -> None:
        if state in self.reached and self.reached[state][0] <= cost:
            return
        assert state not in self.closed, (state, cost, self.closed[state])
        self.reached[state] = (cost, move)
        self.pushed += 1
        src, dst = (state, self.space.dst) if self.is_forward else (self.space.src, state)
        heapq.heappush(self.heap, (cost + self.space.at_least(src, dst), -self.pushed, state))
