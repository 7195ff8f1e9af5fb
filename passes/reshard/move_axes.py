"""The moves of axes between the dims of one value: states, the moves between them, and the cost of each.

Axis parts are numbered *atoms*. A state says which atoms cut each dim, minor last, and which are partial. Costs are
exact integers: bytes sent by the ring algorithms, in units of the value's size, and a small latency a collective.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

from shardc.language.machine import CollectiveKind
from shardc.language.sharding import ceil_div

Atoms = tuple[int, ...]
SMALLEST = 2  # an axis of one rank counts as one of two, so that both have one plan
LATENCY = 64  # one more collective must save a 64th of the largest local value


class State(NamedTuple):
    """For each dim the atoms that cut it, major first; and the atoms over which a reduction is still to be done."""

    lists: tuple[Atoms, ...]
    partial: Atoms

    @property
    def used(self) -> set[int]:
        """Every atom that cuts or is partial."""
        return {atom for atoms in self.lists for atom in atoms} | set(self.partial)

    def put(self, *changes: tuple[int, Atoms], partial: Atoms | None = None) -> State:
        """The state with other atoms on some dims."""
        lists = list(self.lists)
        for dim, atoms in changes:
            lists[dim] = atoms
        return State(tuple(lists), self.partial if partial is None else partial)


class Move(NamedTuple):
    """A collective or a slice: its atoms, major first, the dims it names, and the states before and after."""

    kind: CollectiveKind
    atoms: Atoms
    dims: tuple[int, ...]
    before: State
    after: State


Edge = tuple[Move, int]  # a move and its cost


@dataclass(frozen=True)
class Space:
    """The space of a search, with its bounds: a local value is never larger than at the larger end.

    ``sizes``: of the atoms. ``room``: the elements of each dim left to cut. ``permutes``: whether permutes are moves
    like all others; else the search may put one where its two sides meet. ``reorders``: it must put one there.
    ``loose``: the dims that are cut unevenly at an end. Any atoms may cut these, except neighbours that join into one
    cut (``joins``) if that leaves other chunks. Their atoms come and go one at a time, since each cuts the shards of
    those before it, unless they divide these. ``spare``: atoms of neither end that may cut on the way.
    """

    sizes: tuple[int, ...]
    room: tuple[int, ...]
    src: State
    dst: State
    loose: frozenset[int] = frozenset()
    joins: frozenset[tuple[int, int]] = frozenset()
    permutes: bool = False
    reorders: bool = False
    spare: frozenset[int] = frozenset()

    @cached_property
    def _pieces(self) -> dict[Atoms, int]:
        return {}

    @cached_property
    def wanted(self) -> set[int]:
        """The atoms that cut the target, and spare ones: only these are worth a slice."""
        return {atom for atoms in self.dst.lists for atom in atoms} | self.spare

    @cached_property
    def scale(self) -> int:
        """The whole value's size, chosen so that every cost is a whole number."""
        return LATENCY * math.prod(max(size, SMALLEST) for size in self.sizes) ** 2

    @cached_property
    def bound(self) -> int:
        """The largest local value allowed."""
        return max(self.local(self.src), self.local(self.dst))

    @cached_property
    def latency(self) -> int:
        """The cost of one more collective, which it must save."""
        return self.bound // LATENCY

    def pieces(self, atoms: Atoms) -> int:
        """The number of pieces that atoms cut into."""
        known = self._pieces.get(atoms)
        if known is None:
            known = self._pieces[atoms] = math.prod([max(self.sizes[atom], SMALLEST) for atom in atoms])
        return known

    def local(self, state: State) -> int:
        """The size of one rank's value."""
        return self.scale // math.prod(map(self.pieces, state.lists))

    def fits(self, dim: int, atoms: Atoms) -> bool:
        """Whether the atoms may cut the dim: they divide it, or it is loose.

        In a loose dim, no two neighbours may join into one cut that leaves other chunks than the two in turn.
        """
        room = self.room[dim]
        if dim not in self.loose:
            return room % math.prod([self.sizes[atom] for atom in atoms]) == 0
        for i, atom in enumerate(atoms):
            after = atoms[i + 1] if i + 1 < len(atoms) else None
            if after is not None and (atom, after) in self.joins and room % (self.sizes[atom] * self.sizes[after]):
                return False
            room = ceil_div(room, self.sizes[atom])
        return True

    def _go_together(self, dim: int, atoms: Atoms, more: Atoms) -> bool:
        """Whether one collective may cut the dim by ``more``, after ``atoms``, or gather it again."""
        if dim not in self.loose or len(more) == 1:
            return True
        left = ceil_div(self.room[dim], math.prod([self.sizes[atom] for atom in atoms]))
        return left % math.prod([self.sizes[atom] for atom in more]) == 0

    def takes(self, dim: int, atoms: Atoms, more: Atoms) -> bool:
        """Whether one collective may cut the dim by ``more``, after ``atoms``."""
        return self.fits(dim, atoms + more) and self._go_together(dim, atoms, more)

    def suffixes(self, dim: int, atoms: Atoms) -> Iterator[tuple[Atoms, Atoms]]:
        """The atoms that stay and the minor ones that leave, for each way that minor atoms may leave a dim together."""
        ways = ((atoms[:i], atoms[i:]) for i in reversed(range(len(atoms))))
        return (way for way in ways if self._go_together(dim, *way))

    def counts(self, state: State) -> object:
        """The number of pieces of each dim, and the partial atoms: equal for states that are a permute apart."""
        sizes = [
            tuple(self.sizes[atom] for atom in atoms) if dim in self.loose else math.prod(self.sizes[a] for a in atoms)
            for dim, atoms in enumerate(state.lists)
        ]
        return (*sizes, *(self.pieces(atoms) for atoms in state.lists), state.partial)

    def at_least(self, src: State, dst: State) -> int:
        """A lower bound on the cost of a path between two states.

        A value grows only by received elements. A dim gets fewer pieces only by a collective of its own. A reduction
        takes a collective, on a value that was at most sliced before.
        """
        joined = sum(self.pieces(a) > self.pieces(b) for a, b in zip(src.lists, dst.lists, strict=True))
        least = max(0, self.local(dst) - self.local(src)) + self.latency * joined
        if src.partial == dst.partial:
            return least
        smallest = self.local(src) // self.pieces(tuple(self.wanted - src.used))
        return least + smallest - smallest * self.pieces(dst.partial) // self.pieces(src.partial) + self.latency


def moves_from(space: Space, state: State) -> Iterator[Edge]:
    """Every move from a state."""
    local, latency, free = space.local(state), space.latency, sorted(space.wanted - state.used)
    for dim, atoms in enumerate(state.lists):
        for atom in free:
            if space.fits(dim, (*atoms, atom)):
                yield Move("shard_slice", (atom,), (dim,), state, state.put((dim, (*atoms, atom)))), 0
        for keep, suffix in space.suffixes(dim, atoms):
            ways = space.pieces(suffix)
            if local * ways <= space.bound:
                yield Move("all_gather", suffix, (dim,), state, state.put((dim, keep))), local * ways - local + latency
            for dst, others in enumerate(state.lists):
                if dst != dim and space.takes(dst, others, suffix):
                    after = state.put((dim, keep), (dst, others + suffix))
                    yield Move("all_to_all", suffix, (dim, dst), state, after), local - local // ways + latency
    for some in _arrangements(state.partial):
        rest, once = tuple(atom for atom in state.partial if atom not in some), local - local // space.pieces(some)
        if some == tuple(sorted(some)):
            yield Move("all_reduce", some, (), state, state.put(partial=rest)), 2 * once + latency
        for dim, atoms in enumerate(state.lists):
            if space.takes(dim, atoms, some):
                after = state.put((dim, atoms + some), partial=rest)
                yield Move("reduce_scatter", some, (dim,), state, after), once + latency
    starts = [0, *accumulate(map(len, state.lists))]
    for order in permutations(sum(state.lists, ())) if space.permutes else ():  # the atoms that cut, dealt out anew
        after = State(tuple(order[start:end] for start, end in pairwise(starts)), state.partial)
        if after != state and space.counts(after) == space.counts(state):
            yield Move("collective_permute", (), (), state, after), local + latency


def moves_into(space: Space, state: State) -> Iterator[Edge]:
    """Every move that leads to a state, except permutes: the moves of ``moves_from``, undone."""
    local, latency, used, reducible = space.local(state), space.latency, state.used, set(space.src.partial)
    for dim, atoms in enumerate(state.lists):
        for keep, suffix in space.suffixes(dim, atoms):
            ways = space.pieces(suffix)
            if len(suffix) == 1 and suffix[0] in space.wanted and local * ways <= space.bound:
                yield Move("shard_slice", suffix, (dim,), state.put((dim, keep)), state), 0
            if reducible.issuperset(suffix) and local * ways <= space.bound:
                before = state.put((dim, keep), partial=tuple(sorted(state.partial + suffix)))
                yield Move("reduce_scatter", suffix, (dim,), before, state), space.local(before) - local + latency
            for src, others in enumerate(state.lists):
                if src != dim and space.takes(src, others, suffix):
                    before = state.put((dim, keep), (src, others + suffix))
                    yield Move("all_to_all", suffix, (src, dim), before, state), local - local // ways + latency
    for some in _arrangements(tuple(atom for atom in range(len(space.sizes)) if atom not in used)):
        once = local - local // space.pieces(some)
        for dim, atoms in enumerate(state.lists):
            if space.takes(dim, atoms, some):
                yield Move("all_gather", some, (dim,), state.put((dim, atoms + some)), state), once + latency
        if some == tuple(sorted(some)) and reducible.issuperset(some):
            before = state.put(partial=tuple(sorted(state.partial + some)))
            yield Move("all_reduce", some, (), before, state), 2 * once + latency


def _arrangements(atoms: Atoms) -> Iterator[Atoms]:
    return (some for count in range(1, len(atoms) + 1) for some in permutations(atoms, count))


class Path(NamedTuple):
    """Moves from one state to another, and their total cost."""

    moves: tuple[Move, ...]
    cost: int


def cheapest_path(space: Space) -> Path | None:
    """The cheapest moves from the source to the target; None if no path divides evenly."""
    src, dst = _Side(space, space.src, is_forward=True), _Side(space, space.dst, is_forward=False)
    best: Path | None = None
    least: float = math.inf
    while min(src.next_cost, dst.next_cost) < least:
        side, other = (src, dst) if src.next_cost <= dst.next_cost else (dst, src)
        for state, meeting in side.close_next(other):
            one, two = (state, meeting) if side is src else (meeting, state)
            is_one = one == two and not space.reorders
            cost = src.closed[one] + dst.closed[two] + (0 if is_one else space.local(one) + space.latency)
            if cost < least:
                permute = () if is_one else (Move("collective_permute", (), (), one, two),)
                best, least = Path((*src.path(one), *permute, *dst.path(two)), cost), cost
    return best


def may_be_shared(space: Space, path: Path) -> bool:
    """Whether cuts by axes that neither end uses might pay.

    To gather their pieces costs up to the smallest local value on the path, so the path's reductions and the moves that
    change no size must cost more than that. A path that only reduces, gathers and slices stays as it is.
    """
    smallest = min(map(space.local, (space.src, *(move.after for move in path.moves))))
    moves = [move for move in path.moves if move.kind in ("all_to_all", "collective_permute")]
    reductions = [move for move in path.moves if move.kind in ("all_reduce", "reduce_scatter")]
    sent = sum(_sent(space, move) for move in moves + reductions)
    return bool(moves) and sent > smallest + space.latency


def _sent(space: Space, move: Move) -> int:
    """The cost, without latency, of a move that does not enlarge the local value."""
    local = space.local(move.before)
    if move.kind == "collective_permute":
        return local
    return (2 if move.kind == "all_reduce" else 1) * (local - local // space.pieces(move.atoms))


@dataclass
class _Side:
    """The A* search from one end. The next open state has the least sum of its cost so far and a bound on the rest.

    ``closed``: states with their final cost. ``firsts``: the first closed state of each count of pieces, which is the
    cheapest of its kind. ``reached``: the least known cost and the last move of the path to a state. Among equals the
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
        """A lower bound on the cost of any path through a state that is still open."""
        return self.heap[0][0] if self.heap else math.inf

    def close_next(self, other: _Side) -> Iterator[tuple[State, State]]:
        """Close the next state, and yield where it meets the other end: in itself, or in a state a permute away."""
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

    def path(self, state: State) -> tuple[Move, ...]:
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
