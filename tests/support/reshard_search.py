"""The fewest bytes that any sequence of collectives sends from one sharding to another: every sequence is searched.

A state is a cut of each dim by *atoms*, the prime parts of the mesh's axes, major first, and the atoms over which a sum
is open. Dijkstra's search goes from state to state by what the runtime has:

- ``shard_slice`` cuts a dim by any atom that does nothing yet, and sends nothing;
- ``all_gather`` joins the minor atoms of a dim, as many as one likes: of the ``n`` pieces a rank sends ``n - 1``;
- ``all_to_all`` moves the minor atoms of one dim to the minor end of another: (n - 1) / n of the local value;
- ``all_reduce`` closes sums over some atoms: twice (n - 1) / n of the local value, ``reduce_scatter`` once;
- ``collective_permute`` leads to every state with equal local shapes and open sums: the whole local value.

Every dim is cut evenly in all states, and no local value is larger than the larger one of both ends. Only bytes count:
a sequence of many collectives is as good as one of few.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import permutations

from shardc.language.mesh import AxisPart, Mesh, part_ends, split_parts
from shardc.language.sharding import Sharding
from shardc.program.collective import wire_bytes

Atoms = tuple[int, ...]
State = tuple[tuple[Atoms, ...], frozenset[int]]  # what cuts each dim, and what is partial
Edge = tuple[State, int]  # a state that one collective leads to, and the elements sent


def prime_parts(mesh: Mesh) -> tuple[AxisPart, ...]:
    """The axes of a mesh in parts of a prime size, major first."""
    parts: list[AxisPart] = []
    for name, size in mesh.sizes.items():
        pre = 1
        while pre < size:
            prime = next(each for each in range(2, size + 1) if size // pre % each == 0)
            parts.append(AxisPart(name, pre, prime))
            pre *= prime
    return tuple(parts)


class ReshardSearch:
    """Searches between shardings of a value of one shape on one mesh; what it finds out about states is kept."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...]) -> None:
        self.shape, self.units, self.atoms = shape, mesh.size, prime_parts(mesh)
        self.numbers = {part: number for number, part in enumerate(self.atoms)}
        self.ends = part_ends(self.atoms)
        self.known_edges: dict[State, list[Edge]] = {}
        self.known_locals: dict[tuple[Atoms, ...], tuple[int, ...] | None] = {}
        self.known_cuts: dict[frozenset[int], dict[tuple[int, ...], list[State]]] = {}

    def fewest(self, src: Sharding, dst: Sharding) -> int:
        """The fewest elements that a rank sends from one sharding to the other."""
        start, target = self.state(src), self.state(dst)
        bound = max(self.local_size(start), self.local_size(target))
        costs, done, permuted = {start: 0}, set(), set()
        heap = [(0, 0, start)]
        while heap:
            cost, _, state = heapq.heappop(heap)
            if state == target:
                return cost
            if state in done:
                continue
            done.add(state)
            ways = self.edges(state)
            kind = self.local_shape(state[0]), state[1]
            if kind not in permuted:  # the first state of its local shape is the cheapest, and leads to all others
                permuted.add(kind)
                ways = [*ways, *self.permutes(state)]
            for after, sent in ways:
                is_legal = self.local_size(after) <= bound and target[1] <= after[1]
                if is_legal and cost + sent < costs.get(after, math.inf):
                    costs[after] = cost + sent
                    heapq.heappush(heap, (cost + sent, len(costs), after))
        raise AssertionError(f"no way from {src} to {dst}")

    def state(self, sharding: Sharding) -> State:
        """A sharding that is plain and even on every dim, as a state."""

        def numbers(axes: tuple[AxisPart, ...]) -> Atoms:
            return tuple(self.numbers[part] for part in split_parts(axes, self.ends))

        assert not any(cut.minor for cut in sharding.dims), sharding
        return tuple(numbers(cut.axes) for cut in sharding.dims), frozenset(numbers(sharding.partial_axes))

    def pieces(self, atoms: Atoms) -> int:
        return math.prod(self.atoms[atom].size for atom in atoms)

    def local_shape(self, cuts: tuple[Atoms, ...]) -> tuple[int, ...] | None:
        """The shape that a rank holds; None where a dim is cut unevenly."""
        if cuts not in self.known_locals:
            counts = [self.pieces(atoms) for atoms in cuts]
            is_even = all(size % count == 0 for size, count in zip(self.shape, counts, strict=True))
            local = tuple(size // count for size, count in zip(self.shape, counts, strict=True))
            self.known_locals[cuts] = local if is_even else None
        return self.known_locals[cuts]

    def local_size(self, state: State) -> int:
        local = self.local_shape(state[0])
        assert local is not None, state
        return math.prod(local)

    def edges(self, state: State) -> list[Edge]:
        """Where every collective but permutes leads to from a state."""
        if state not in self.known_edges:
            found = [(after, sent) for after, sent in self.every_edge(state) if self.local_shape(after[0])]
            self.known_edges[state] = found
        return self.known_edges[state]

    def every_edge(self, state: State) -> Iterator[Edge]:
        cuts, partial = state
        local, dims = self.local_size(state) * self.units, range(len(cuts))

        def put(atoms: Atoms, *dims: int, keep: Atoms = (), still: frozenset[int] = partial) -> State:
            """The state with ``atoms`` added to the last of the dims, and ``keep`` on the first of two."""
            after = list(cuts)
            if len(dims) == 2:
                after[dims[0]] = keep
            after[dims[-1]] += atoms
            return tuple(after), still

        free = set(range(len(self.atoms))) - partial - {atom for atoms in cuts for atom in atoms}
        for dim in dims:
            yield from ((put((atom,), dim), 0) for atom in free)
            for i in range(len(cuts[dim])):
                keep, gone = cuts[dim][:i], cuts[dim][i:]
                count = self.pieces(gone)
                yield put((), dim, dim, keep=keep), wire_bytes("all_gather", local * count, count)
                sent = wire_bytes("all_to_all", local, count)
                yield from ((put(gone, dim, other, keep=keep), sent) for other in dims if other != dim)
        for number in range(1, len(partial) + 1):
            for some in permutations(partial, number):
                count, still = self.pieces(some), partial - set(some)
                if some == tuple(sorted(some)):
                    yield (cuts, still), wire_bytes("all_reduce", local, count)
                sent = wire_bytes("reduce_scatter", local, count)
                yield from ((put(some, dim, still=still), sent) for dim in dims)

    def permutes(self, state: State) -> list[Edge]:
        """Where permutes lead to: every state with the same local shape and the same open sums."""
        cuts, partial = state
        if partial not in self.known_cuts:
            self.known_cuts[partial] = {}
            atoms = [atom for atom in range(len(self.atoms)) if atom not in partial]
            for each in every_cut(atoms, len(cuts)):
                local = self.local_shape(each)
                if local is not None:
                    self.known_cuts[partial].setdefault(local, []).append((each, partial))
        local, sent = self.local_shape(cuts), self.local_size(state) * self.units
        assert local is not None
        return [(after, sent) for after in self.known_cuts[partial][local]]


def every_cut(atoms: list[int], ndim: int) -> Iterator[tuple[Atoms, ...]]:
    """Every way to cut ``ndim`` dims by some of the atoms, in every order."""
    if not ndim:
        yield ()
        return
    for number in range(len(atoms) + 1):
        for first in permutations(atoms, number):
            rest = [atom for atom in atoms if atom not in first]
            yield from ((first, *others) for others in every_cut(rest, ndim - 1))
