"""What executes collectives: the protocol of every runtime, and all ranks of a mesh in one process."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from shardc.language.collective_kind import CollectiveKind
from shardc.language.mesh import Mesh
from shardc.language.partition import parse_parts
from shardc.language.sharding import ceil_div, chunk_of, num_shards
from shardc.ops.piece import fill_padding
from shardc.program.collective import group_size, source_position, wire_bytes
from shardc.program.communication import Member, members
from shardc.program.program import Program

from .exchange import Exchange, OverlapExchange, WindowExchange
from .functional import join, split

Tensors = Sequence[Tensor]  # one for each rank that lives in this process
Results = Callable[[], Tensors]  # waits
Places = Sequence[Tensor | None]  # where results may be put; none, or one for each
PartNames = tuple[str, ...]  # axis parts as printed, major first

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(slots=True)
class Traffic:
    """What one rank has sent, by kind of collective: calls, and bytes."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: CollectiveKind, num_bytes: int) -> None:
        """Count one collective."""
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes

    def clear(self) -> None:
        """Start again from nothing."""
        self.calls.clear()
        self.bytes.clear()


class Starter(Protocol):
    """Starts collectives over the ranks of a mesh, of which those at ``positions`` live in this process.

    ``traffic`` is parallel to ``positions``. ``start`` runs the method of ``Comm`` that it names, and gives what waits
    for the results; ``is_own``: no one else reads the operands; ``into``: where results may be put, which is done where
    the runtime ``gathers_in_place``. ``start_bucket`` starts one for many values.
    """

    @property
    def mesh(self) -> Mesh: ...
    @property
    def positions(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def traffic(self) -> tuple[Traffic, ...]: ...
    @property
    def gathers_in_place(self) -> bool: ...
    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results: ...
    def start_bucket(self, flat: Flat, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]: ...


class Comm(Starter, Protocol):
    """The collectives themselves, named and argued as the functions of shardc/collective.py.

    They take and return one tensor for each of ``positions``. A collective in groups of one does nothing.
    """

    def all_gather(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors: ...
    def shard_slice(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors: ...
    def mask_padding(self, xs: Tensors, axes: PartNames, dim: int, size: int, inner: int, fill: float) -> Tensors: ...
    def all_reduce(self, xs: Tensors, axes: PartNames, op: str) -> Tensors: ...
    def reduce_scatter(self, xs: Tensors, axes: PartNames, op: str, dim: int) -> Tensors: ...
    def all_to_all(self, xs: Tensors, axes: PartNames, src_dim: int, dst_dim: int) -> Tensors: ...
    def collective_permute(self, xs: Tensors, src_axes: PartNames, dst_axes: PartNames) -> Tensors: ...
    def rechunk(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], inner: int) -> Tensors: ...
    def windows(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], fill: float) -> Tensors: ...
    def overlap_add(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...]) -> Tensors: ...


class AtPositions:
    """What each rank does alone, where it stands: the kinds that send nothing."""

    mesh: Mesh
    positions: tuple[int, ...]

    def shard_slice(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors:
        """Each rank keeps a copy of its piece, so that the rest can be freed."""
        count, indices = _indices(self.mesh, axes, self.positions)
        if count == 1:
            return xs
        pieces = (_chunk(x, count, dim, index) for x, index in zip(xs, indices, strict=True))
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]

    def mask_padding(self, xs: Tensors, axes: PartNames, dim: int, size: int, inner: int, fill: float) -> Tensors:
        """Padding reads ``fill``."""
        parts = parse_parts(axes, self.mesh)
        full, found = ceil_div(size, num_shards(parts)), []
        for x, position in zip(xs, self.positions, strict=True):
            _, length = chunk_of(size, parts, self.mesh, position)
            found.append(fill_padding(x, dim, inner, full, length, fill))
        return found


class SimulatedComm(AtPositions):
    """Every rank of the mesh in this process, in lockstep; reductions run in the order of the group's ranks.

    ``traffic`` counts what each rank would send by the ring algorithms.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.mesh = mesh
        self.positions = tuple(range(mesh.size))
        self.device = torch.device(device)
        self.traffic = tuple(Traffic() for _ in self.positions)
        self.gathers_in_place = False

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Lockstep: it is done at once, in memory of its own."""
        results: Tensors = getattr(self, kind)(xs, *args)
        return lambda: results

    def start_bucket(self, flat: Flat, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """As one collective."""
        return start_packed(self, flat, [flat.pack(row) for row in rows])

    def all_gather(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors:
        """Every rank of a group gets the pieces of all, joined."""
        return self._in_groups("all_gather", xs, axes, lambda group: [torch.cat(tuple(group), dim)] * len(group))

    def all_reduce(self, xs: Tensors, axes: PartNames, op: str) -> Tensors:
        """Every rank of a group gets the reduction of all."""
        return self._in_groups("all_reduce", xs, axes, lambda group: [_reduced(group, op)] * len(group))

    def reduce_scatter(self, xs: Tensors, axes: PartNames, op: str, dim: int) -> Tensors:
        """Each rank of a group gets its piece of the reduction of all."""
        return self._in_groups(
            "reduce_scatter", xs, axes, lambda group: [x.clone() for x in _chunks(_reduced(group, op), len(group), dim)]
        )

    def all_to_all(self, xs: Tensors, axes: PartNames, src_dim: int, dst_dim: int) -> Tensors:
        """The i-th rank of a group gets the i-th piece along ``dst_dim`` of every rank, joined along ``src_dim``."""

        def exchange(group: Tensors) -> Tensors:
            pieces = [_chunks(x, len(group), dst_dim) for x in group]
            return [torch.cat(received, src_dim) for received in zip(*pieces, strict=True)]

        return self._in_groups("all_to_all", xs, axes, exchange)

    def collective_permute(self, xs: Tensors, src_axes: PartNames, dst_axes: PartNames) -> Tensors:
        """Local values change places."""
        src, dst = parse_parts(src_axes, self.mesh), parse_parts(dst_axes, self.mesh)
        sources = [source_position(self.mesh, position, src, dst) for position in self.positions]
        for position, source in enumerate(sources):
            self.traffic[source].count("collective_permute", 0 if source == position else xs[source].nbytes)
        return [xs[source] for source in sources]

    def rechunk(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], inner: int) -> Tensors:
        """Each rank gets its new chunk."""
        return self.windows(xs, axes, dim, values, 0)

    def windows(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], fill: float) -> Tensors:
        """Each rank gets its window, from its own chunk and its neighbours'."""
        return self._exchange(xs, axes, WindowExchange(values, dim, fill))

    def overlap_add(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...]) -> Tensors:
        """Each rank gets the sum of what its own window and its neighbours' have for its chunk."""
        return self._exchange(xs, axes, OverlapExchange(values, dim))

    def _exchange(self, xs: Tensors, axes: PartNames, exchange: Exchange) -> Tensors:
        results = list(xs)
        for group in self.mesh.groups(parse_parts(axes, self.mesh)):
            sent = [exchange.pieces(xs[position], i) for i, position in enumerate(group)]
            for i, position in enumerate(group):
                results[position] = exchange.join(xs[position], i, [pieces[i] for pieces in sent])
                moved = sum(piece.nbytes for j, pieces in enumerate(sent[i]) if j != i for piece in pieces)
                if exchange.moves:
                    self.traffic[position].count("collective_permute", moved)
        return results

    def _in_groups(
        self, kind: CollectiveKind, xs: Tensors, axes: PartNames, act: Callable[[Tensors], Tensors]
    ) -> Tensors:
        results = list(xs)
        for group in self.mesh.groups(parse_parts(axes, self.mesh)):
            if len(group) == 1:
                continue
            for position, result in zip(group, act([xs[position] for position in group]), strict=True):
                results[position] = result
                payload = max(xs[position].nbytes, result.nbytes)
                self.traffic[position].count(kind, wire_bytes(kind, payload, len(group)))
        return results


@functools.lru_cache(maxsize=1024)
def _indices(mesh: Mesh, axes: PartNames, positions: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Into how many pieces axes cut, and for each position the index of its own."""
    parts = parse_parts(axes, mesh)
    return num_shards(parts), tuple(mesh.index(position, parts) for position in positions)


def _chunk(x: Tensor, count: int, dim: int, index: int) -> Tensor:
    size, rest = divmod(x.shape[dim], count)
    assert not rest, (tuple(x.shape), dim, count)
    return x.narrow(dim, index * size, size)


def _chunks(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    return tuple(_chunk(x, count, dim, index) for index in range(count))


def _reduced(group: Tensors, op: str) -> Tensor:
    return functools.reduce(REDUCE[op], group)


Rows = Sequence[Sequence[Tensor]]  # for each rank that lives in this process one tensor for each value of a bucket


@dataclass(frozen=True, slots=True)
class Flat:
    """How a bucket's values lie in a buffer: ``count`` ranks in a group, ``shapes`` of the operands of one rank."""

    parts: tuple[Member, ...]
    shapes: tuple[tuple[int, ...], ...]
    count: int

    @staticmethod
    def of(program: Program, node: fx.Node) -> Flat:
        """That of a bucket of a localized program."""
        assert program.mesh is not None
        parts = members(node)
        shapes = tuple(program.value_type(program.value(part.operand)).shape for part in parts)
        return Flat(parts, shapes, group_size(program.mesh, parts[0].kind, parts[0].args))

    @property
    def kind(self) -> CollectiveKind:
        """That of the collective."""
        return self.parts[0].kind

    @property
    def args(self) -> tuple[object, ...]:
        """The arguments of the collective of the buffer."""
        axes, *rest = self.parts[0].args
        along = {"all_reduce": rest, "reduce_scatter": [*rest[:1], 0], "all_gather": [0]}
        return axes, *along[self.kind]

    def places(self, like: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """A new buffer of an all_reduce, and where in it each value goes, flat."""
        sizes = [math.prod(shape) for shape in self.shapes]
        buffer = like.new_empty(sum(sizes))
        return buffer, buffer.split(sizes)

    def pack(self, xs: Sequence[Tensor]) -> Tensor:
        """The buffer: flat, or for a reduce_scatter a row for each rank, or for an all_gather one row."""
        if self.kind == "all_reduce":
            return torch.cat([x.reshape(-1) for x in xs])
        if self.kind == "all_gather":
            return torch.cat([x.reshape(1, -1) for x in xs], 1)
        pairs = zip(xs, self.parts, strict=True)
        return torch.cat([split(x, self.count, part.args[2]).flatten(1) for x, part in pairs], 1)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """What each member makes; views of the buffer where they can be."""
        rows = buffer if buffer.dim() == 2 else buffer.unsqueeze(0)
        share = self.count if self.kind == "reduce_scatter" else 1
        pieces = rows.split([math.prod(shape) // share for shape in self.shapes], 1)
        return [self._result(*each) for each in zip(pieces, self.parts, self.shapes, strict=True)]

    def _result(self, piece: Tensor, part: Member, shape: tuple[int, ...]) -> Tensor:
        if part.kind == "all_gather":
            return join(piece.reshape(self.count, *shape), part.args[1]).contiguous()  # a view would hold all
        if part.kind == "reduce_scatter":
            shape = tuple(size // self.count if dim == part.args[2] else size for dim, size in enumerate(shape))
        return piece.view(shape)


def put(places: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Put values where in a buffer they go."""
    torch._foreach_copy_(list(places), [x.reshape(-1) for x in xs])


def start_packed(comm: Starter, flat: Flat, buffers: Sequence[Tensor]) -> Callable[[], Rows]:
    """Start a bucket as one collective of its buffer, which each rank has packed."""
    finish = comm.start(flat.kind, buffers, *flat.args, is_own=True)
    return lambda: [flat.unpack(buffer) for buffer in finish()]
