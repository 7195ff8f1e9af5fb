"""The cheapest moves of axes between the dims of one value: a search from both ends, over whole numbers alone.

Axis parts are numbered *atoms*; a state says which atoms cut each dim, minor last, and which are partial. From the
source a state is reached by moves, from the target by moves undone; of each state only the cheapest way is kept. The
two meet where a state is reached from both ends, or where two states cut every dim into as many pieces: then one
permute leads from the first to the second. Costs are exact integers: bytes sent by the ring algorithms, in units of
the value's size, and a little for each collective.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from shardc.collective import Kind

Lists = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """For each dim the atoms that cut it, major first; and the atoms over which a reduction is still to be done."""

    lists: Lists
    partial: tuple[int, ...]

    @property
    def used(self) -> set[int]:
        """Every atom that cuts or is partial."""
        return {atom for atoms in self.lists for atom in atoms} | set(self.partial)

    def put(self, *changes: tuple[int, tuple[int, ...]], partial: tuple[int, ...] | None = None) -> State:
        """The same with other atoms on some dims."""
        lists = list(self.lists)
        for dim, atoms in changes:
            lists[dim] = atoms
        return State(tuple(lists), self.partial if partial is None else partial)


class Move(NamedTuple):
    """A collective or a slice: its atoms, major first, the dims it names, and the states before and after."""

    kind: Kind
    atoms: tuple[int, ...]
    dims: tuple[int, ...]
    before: State
    after: State


Edge = tuple[Move, int]  # a move and its cost


@dataclass(frozen=True)
class Space:
    """What the search may use.

    ``sizes``: of the atoms. ``room``: into how many pieces each dim may be cut is what divides it. A move never makes
    a local value larger than at both ends. ``SMALLEST``: an axis of one rank weighs as one of two, so that a plan
    does not depend on it.
    """

    sizes: tuple[int, ...]
    room: tuple[int, ...]
    src: State
    dst: State

    SMALLEST = 2

    @cached_property
    def _known(self) -> dict[tuple[int, ...], int]:
        return {}

    @cached_property
    def weights(self) -> tuple[int, ...]:
        return tuple(max(size, self.SMALLEST) for size in self.sizes)

    @cached_property
    def wanted(self) -> set[int]:
        """The atoms that cut the target: only these are worth a slice."""
        return {atom for atoms in self.dst.lists for atom in atoms}

    @cached_property
    def scale(self) -> int:
        """The whole value's size, such that every cost is a whole number."""
        return math.prod(self.weights) ** 2 << 10

    @cached_property
    def bound(self) -> int:
        """The largest local value allowed."""
        return max(self.local(self.src), self.local(self.dst))

    @cached_property
    def latency(self) -> int:
        """What one more collective must save."""
        return self.bound >> 6

    def pieces(self, atoms: tuple[int, ...]) -> int:
        """Into how many pieces atoms cut."""
        known = self._known.get(atoms)
        if known is None:
            known = self._known[atoms] = math.prod([self.weights[atom] for atom in atoms])
        return known

    def local(self, state: State) -> int:
        """The size of one rank's value."""
        return self.scale // math.prod(map(self.pieces, state.lists))

    def fits(self, dim: int, atoms: tuple[int, ...]) -> bool:
        """Whether the dim divides by the atoms."""
        return self.room[dim] % math.prod([self.sizes[atom] for atom in atoms]) == 0

    def at_least(self, src: State, dst: State) -> int:
        """No way between two states costs less.

        A value grows only by what is received, a dim is cut into fewer pieces by a collective of its own alone, and a
        reduction takes one, on a value that was at most sliced before.
        """
        joined = sum(self.pieces(a) > self.pieces(b) for a, b in zip(src.lists, dst.lists, strict=True))
        least = max(0, self.local(dst) - self.local(src)) + self.latency * joined
        if src.partial == dst.partial:
            return least
        smallest = self.local(src) // self.pieces(tuple(self.wanted - src.used))
        return least + smallest - smallest * self.pieces(dst.partial) // self.pieces(src.partial) + self.latency

    def counts(self, state: State) -> object:
        """Into how many pieces each dim is cut, and what is partial: equal where a permute leads."""
        sizes = [math.prod([self.sizes[atom] for atom in atoms]) for atoms in state.lists]
        return (*sizes, *(self.pieces(atoms) for atoms in state.lists), state.partial)


def cheapest_moves(space: Space) -> tuple[Move, ...] | None:
    """The cheapest moves from the source to the target; None if the dims do not divide on any way."""
    there, back = _Side(space, space.src, is_forward=True), _Side(space, space.dst, is_forward=False)
    best: tuple[Move, ...] | None = None
    least: float = math.inf
    while min(there.next_cost, back.next_cost) < least:
        side, other = (there, back) if there.next_cost <= back.next_cost else (back, there)
        state = side.close()
        for found in side.meetings(state, other) if state is not None else ():
            one, two = (state, found) if side is there else (found, state)
            cost = there.closed[one] + back.closed[two] + (0 if one == two else space.local(one) + space.latency)
            if cost < least:
                permute = () if one == two else (Move("collective_permute", (), (), one, two),)
                best, least = (*there.way(one), *permute, *back.way(two)), cost
    return best


@dataclass
class _Side:
    """One end's search (A*): cheapest first by the cost so far and the least that can follow.

    ``closed``: states with their final cost. ``firsts``: the first closed state of each count of pieces, which is the
    cheapest of its kind. ``reached``: the best known cost and the move that leads to a state.
    """

    space: Space
    start: State
    is_forward: bool
    closed: dict[State, int] = field(default_factory=dict)
    firsts: dict[object, State] = field(default_factory=dict)
    reached: dict[State, tuple[int, Move | None]] = field(default_factory=dict)  # the last found first, among equals
    heap: list[tuple[int, int, State]] = field(default_factory=list)
    pushed: int = 0

    def __post_init__(self) -> None:
        self._reach(self.start, 0, None)

    @property
    def next_cost(self) -> float:
        """No way through a state that is still open costs less."""
        return self.heap[0][0] if self.heap else math.inf

    def close(self) -> State | None:
        """The next state, whose cost is final now; None if it was closed before."""
        _, _, state = heapq.heappop(self.heap)
        if state in self.closed:
            return None
        cost = self.closed[state] = self.reached[state][0]
        self.firsts.setdefault(self.space.counts(state), state)
        edges = moves_from(self.space, state) if self.is_forward else moves_into(self.space, state)
        for move, more in reversed(list(edges)):
            self._reach(move.after if self.is_forward else move.before, cost + more, move)
        return state

    def meetings(self, state: State, other: _Side) -> Iterator[State]:
        """States that the other end has closed and that are this one, or one permute away."""
        if state in other.closed:
            yield state
        counts = self.space.counts(state)
        if self.firsts[counts] == state and counts in other.firsts:
            yield other.firsts[counts]

    def way(self, state: State) -> tuple[Move, ...]:
        """The moves between this end and a state, in the order of execution."""
        moves: list[Move] = []
        while (move := self.reached[state][1]) is not None:
            moves.append(move)
            state = move.before if self.is_forward else move.after
        return tuple(reversed(moves)) if self.is_forward else tuple(moves)

    def _reach(self, state: State, cost: int, move: Move | None) -> None:
        if state in self.closed or (state in self.reached and self.reached[state][0] <= cost):
            return
        self.reached[state] = (cost, move)
        self.pushed += 1
        left = self.space.at_least(state, self.space.dst) if self.is_forward else self.space.at_least(self.space.src, state)
        heapq.heappush(self.heap, (cost + left, -self.pushed, state))


def moves_from(space: Space, state: State) -> Iterator[Edge]:
    """Every move from a state but permutes."""
    local, used = space.local(state), state.used
    for dim, atoms in enumerate(state.lists):
        for atom in sorted(space.wanted - used):
            if space.fits(dim, (*atoms, atom)):
                yield Move("shard_slice", (atom,), (dim,), state, state.put((dim, (*atoms, atom)))), 0
        for keep, suffix in _suffixes(atoms):
            ways = space.pieces(suffix)
            if local * ways <= space.bound:
                after = state.put((dim, keep))
                yield Move("all_gather", suffix, (dim,), state, after), local * ways - local + space.latency
            for dst, others in enumerate(state.lists):
                if dst != dim and space.fits(dst, others + suffix):
                    after = state.put((dim, keep), (dst, others + suffix))
                    yield Move("all_to_all", suffix, (dim, dst), state, after), local - local // ways + space.latency
    for some in _arrangements(state.partial):
        yield from _reductions(space, state, local, some)


def _reductions(space: Space, state: State, local: int, some: tuple[int, ...]) -> Iterator[Edge]:
    rest = tuple(atom for atom in state.partial if atom not in some)
    once = local - local // space.pieces(some)
    if some == tuple(sorted(some)):
        yield Move("all_reduce", some, (), state, state.put(partial=rest)), 2 * once + space.latency
    for dim, atoms in enumerate(state.lists):
        if space.fits(dim, atoms + some):
            after = state.put((dim, atoms + some), partial=rest)
            yield Move("reduce_scatter", some, (dim,), state, after), once + space.latency


def moves_into(space: Space, state: State) -> Iterator[Edge]:
    """Every move that leads to a state but permutes: each of ``moves_from``, undone."""
    local, used = space.local(state), state.used
    for dim, atoms in enumerate(state.lists):
        for keep, suffix in _suffixes(atoms):
            ways = space.pieces(suffix)
            for src, others in enumerate(state.lists):
                if src != dim and space.fits(src, others + suffix):
                    before = state.put((dim, keep), (src, others + suffix))
                    yield Move("all_to_all", suffix, (src, dim), before, state), local - local // ways + space.latency
            if local * ways <= space.bound:
                yield from _cuts_undone(space, state, dim, keep, suffix)
    for some in _arrangements(tuple(atom for atom in range(len(space.sizes)) if atom not in used)):
        yield from _joins_undone(space, state, local, some)


def _cuts_undone(space: Space, state: State, dim: int, keep: tuple[int, ...], suffix: tuple[int, ...]) -> Iterator[Edge]:
    if len(suffix) == 1 and suffix[0] in space.wanted:
        yield Move("shard_slice", suffix, (dim,), state.put((dim, keep)), state), 0
    if set(suffix) <= set(space.src.partial):
        before = state.put((dim, keep), partial=tuple(sorted(state.partial + suffix)))
        yield Move("reduce_scatter", suffix, (dim,), before, state), space.local(before) - space.local(state) + space.latency


def _joins_undone(space: Space, state: State, local: int, some: tuple[int, ...]) -> Iterator[Edge]:
    once = local - local // space.pieces(some)
    for dim, atoms in enumerate(state.lists):
        if space.fits(dim, atoms + some):
            yield Move("all_gather", some, (dim,), state.put((dim, atoms + some)), state), once + space.latency
    if some == tuple(sorted(some)) and set(some) <= set(space.src.partial):
        before = state.put(partial=tuple(sorted(state.partial + some)))
        yield Move("all_reduce", some, (), before, state), 2 * once + space.latency


def _suffixes(atoms: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    return ((atoms[:i], atoms[i:]) for i in reversed(range(len(atoms))))


def _arrangements(atoms: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return (some for count in range(1, len(atoms) + 1) for some in permutations(atoms, count))
