"""The fewest bytes that any sequence of collectives sends from one sharding to another: Dijkstra over all shardings.

Axes are split into *atoms*, parts of prime sizes. A state names the atoms that cut each dim, major first, and those
over which a sum is open. An edge is a collective of the runtime, and its cost is the number of bytes that a rank sends:

- ``shard_slice`` cuts a dim by an atom that neither cuts nor is partial, and sends nothing;
- ``all_gather`` joins the minor atoms of a dim: of n pieces a rank sends n - 1;
- ``all_to_all`` moves the minor atoms of a dim to the minor end of another dim: (n - 1) / n of the local value;
- ``reduce_scatter`` closes the sum over some atoms and cuts a dim by them: as much; ``all_reduce``: twice as much;
- ``collective_permute`` leads to each state with the same local shape and the same open sums: the whole local value.

In every state each dim is cut evenly, and no local value is larger than the larger local value of source and target.
Only bytes count, so a sequence of many collectives is as good as one.
"""

from __future__ import annotations

import heapq
import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from shardc.language.mesh import Axes, AxisPart, Mesh, merge_parts, part_ends, split_parts
from shardc.language.sharding import DimSharding, Sharding, num_shards
from shardc.program.collective import Step, group_size, wire_bytes

Atoms = tuple[int, ...]
Cuts = tuple[Atoms, ...]  # the atoms that cut each dim
State = tuple[Cuts, frozenset[int]]  # the cuts, and the partial atoms
Edge = tuple[State, int]  # the state after a collective, and the units that a rank sends


def prime_parts(mesh: Mesh) -> Axes:
    """The axes of a mesh split into parts of prime sizes, major first."""
    parts: list[AxisPart] = []
    for name, size in mesh.sizes.items():
        pre = 1
        while pre < size:
            prime = next(each for each in range(2, size + 1) if size // pre % each == 0)
            parts.append(AxisPart(name, pre, prime))
            pre *= prime
    return tuple(parts)


class ReshardSearch:
    """Searches between shardings of ``ndim`` dims on one mesh. Edges of a state are cached for later searches.

    Sizes are counted in units. A whole value has ``units`` of them: enough that every message is a whole number.
    """

    def __init__(self, mesh: Mesh, ndim: int) -> None:
        self.atoms, self.ndim, self.units = prime_parts(mesh), ndim, mesh.size**2
        self.known_counts: dict[Cuts, tuple[int, ...]] = {}
        self.known_edges: dict[State, list[Edge]] = {}
        self.known_permutes: dict[frozenset[int], dict[tuple[int, ...], list[State]]] = {}

    def least(self, src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> int:
        """The fewest units that a rank can send. Both shardings must be plain and cut the shape evenly."""
        start, target = self.state(src), self.state(dst)
        bound = max(self.local(start), self.local(target))
        costs, done, permuted = {start: 0}, set(), set()
        heap = [(0, 0, start)]
        while heap[0][2] != target:
            cost, _, state = heapq.heappop(heap)
            if state in done:
                continue
            done.add(state)
            edges, kind = self.edges(state), (self.counts(state[0]), state[1])
            if kind not in permuted:  # the first state of its kind is the cheapest, and a permute leads to all others
                permuted.add(kind)
                edges = edges + self.permutes(state)
            for after, sent in edges:
                total = cost + sent
                if total < costs.get(after, math.inf) and total < costs.get(target, math.inf):
                    if self.local(after) <= bound and target[1] <= after[1] and self.is_even(after, shape):
                        costs[after] = total
                        heapq.heappush(heap, (total, len(costs), after))
        return heap[0][0]

    def state(self, sharding: Sharding) -> State:
        """The state of a sharding."""
        assert not any(cut.minor for cut in sharding.dims), sharding
        ends = part_ends(self.atoms)
        cuts = [tuple(map(self.atoms.index, split_parts(cut.axes, ends))) for cut in sharding.dims]
        return tuple(cuts), frozenset(map(self.atoms.index, split_parts(sharding.partial_axes, ends)))

    def pieces(self, atoms: Atoms) -> int:
        """The number of pieces into which atoms cut."""
        return math.prod([self.atoms[atom].size for atom in atoms])

    def counts(self, cuts: Cuts) -> tuple[int, ...]:
        """The number of pieces into which each dim is cut."""
        if cuts not in self.known_counts:
            self.known_counts[cuts] = tuple(map(self.pieces, cuts))
        return self.known_counts[cuts]

    def local(self, state: State) -> int:
        """The units that a rank holds."""
        return self.units // math.prod(self.counts(state[0]))

    def is_even(self, state: State, shape: tuple[int, ...]) -> bool:
        """Whether each dim is cut evenly."""
        return not any(map(operator.mod, shape, self.counts(state[0])))

    def edges(self, state: State) -> list[Edge]:
        """The edges of all collectives except permutes."""
        if state not in self.known_edges:
            self.known_edges[state] = [*self._moves(state), *self._reductions(state)]
        return self.known_edges[state]

    def _moves(self, state: State) -> Iterator[Edge]:
        cuts, partial = state
        local = self.local(state)
        for dim, atoms in enumerate(cuts):
            for atom in set(range(len(self.atoms))) - partial - set(sum(cuts, ())):
                yield (put(cuts, (dim, (*atoms, atom))), partial), 0
            for i in range(len(atoms)):
                keep, gone = atoms[:i], atoms[i:]
                count = self.pieces(gone)
                yield (put(cuts, (dim, keep)), partial), wire_bytes("all_gather", local * count, count)
                for other in set(range(self.ndim)) - {dim}:
                    after = put(cuts, (dim, keep), (other, cuts[other] + gone))
                    yield (after, partial), wire_bytes("all_to_all", local, count)

    def _reductions(self, state: State) -> Iterator[Edge]:
        cuts, partial = state
        for some in (some for number in range(len(partial)) for some in permutations(partial, number + 1)):
            local, count, still = self.local(state), self.pieces(some), partial.difference(some)
            yield (cuts, still), wire_bytes("all_reduce", local, count)
            for dim in range(self.ndim):
                after = put(cuts, (dim, cuts[dim] + some))
                yield (after, still), wire_bytes("reduce_scatter", local, count)

    def permutes(self, state: State) -> list[Edge]:
        """The edges of permutes: to each state with the same open sums whose dims are cut into as many pieces."""
        cuts, partial = state
        if partial not in self.known_permutes:
            found = self.known_permutes[partial] = {}
            for each in every_cut(set(range(len(self.atoms))) - partial, self.ndim):
                found.setdefault(self.counts(each), []).append((each, partial))
        return [(after, self.local(state)) for after in self.known_permutes[partial][self.counts(cuts)]]


def put(cuts: Cuts, *changes: tuple[int, Atoms]) -> Cuts:
    """The cuts with the atoms of some dims replaced."""
    after = list(cuts)
    for dim, atoms in changes:
        after[dim] = atoms
    return tuple(after)


def every_cut(atoms: set[int], ndim: int) -> Iterator[Cuts]:
    """Every way to cut ``ndim`` dims by some of the atoms, in every order."""
    if ndim == 0:
        yield ()
        return
    for some in (some for number in range(len(atoms) + 1) for some in permutations(atoms, number)):
        yield from ((some, *others) for others in every_cut(atoms.difference(some), ndim - 1))


def units_sent(src: Sharding, steps: Sequence[Step], shape: tuple[int, ...]) -> int:
    """The units that a rank sends in the steps of a plan."""
    total, before, scale = 0, src, src.mesh.size**2
    for step in steps:
        local = max(math.prod(each.local_shape(shape)) for each in (before, step.sharding))
        payload, rest = divmod(scale * local, math.prod(shape))
        assert not rest and step.kind not in ("view", "rechunk"), step
        total += wire_bytes(step.kind, payload, group_size(src.mesh, step.kind, step.args))
        before = step.sharding
    return total


# Random pairs.


@dataclass(frozen=True)
class Pair:
    """A shape, and two plain shardings that cut it evenly."""

    shape: tuple[int, ...]
    src: Sharding
    dst: Sharding

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst} of {list(self.shape)} on {self.src.mesh}"


def random_pair(meshes: Sequence[Mesh], seed: int) -> Pair:
    """A pair for a value of 2 to 4 dims: axes and their halves cut any dim in any order; some sums are or stay open.

    The size of a dim is the least that both cuts divide, or twice the size of the mesh.
    """
    rng = random.Random(seed)
    mesh, ndim = rng.choice(meshes), rng.randint(2, 4)
    (src, free), (dst, _) = (_random_cuts(rng, mesh, ndim) for _ in range(2))
    partial = tuple((part, "sum") for part in free if rng.random() < 0.25)
    taken = [part for cut in dst for part in cut.axes]
    still = [entry for entry in partial if rng.random() < 0.3 and not any(map(entry[0].overlaps, taken))]
    needed = [math.lcm(*(num_shards(cut.axes) for cut in cuts)) for cuts in zip(src, dst, strict=True)]
    shape = tuple(rng.choice((size, 2 * mesh.size)) for size in needed)
    return Pair(shape, Sharding(mesh, src, partial), Sharding(mesh, dst, tuple(still)))


def _random_cuts(rng: random.Random, mesh: Mesh, ndim: int) -> tuple[tuple[DimSharding, ...], Axes]:
    """The cut of each dim, and the parts of axes that cut none."""
    whole = list(map(mesh.axis, mesh.axis_names))
    halved = [axis for axis in whole if axis.size == 4 and rng.random() < 0.5]
    parts = [*(axis for axis in whole if axis not in halved), *(half for axis in halved for half in halves(axis))]
    rng.shuffle(parts)
    places = [rng.randrange(-1, ndim) for _ in parts]
    cuts = [tuple(part for part, at in zip(parts, places, strict=True) if at == dim) for dim in range(-1, ndim)]
    return tuple(DimSharding(merge_parts(axes)) for axes in cuts[1:]), cuts[0]


def halves(part: AxisPart) -> Axes:
    """The major and the minor half of a part."""
    return part.major(2), part.minor(part.size // 2)
