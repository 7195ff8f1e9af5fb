"""The interface that runs a program's collectives, on virtual ranks or on torch.distributed."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from shardc.language.machine import CollectiveKind
from shardc.language.mesh import Mesh
from shardc.language.partition import parse_parts
from shardc.language.sharding import ceil_div, chunk_of, num_shards
from shardc.ops.piece import fill_padding
from shardc.program.collective import group_size
from shardc.program.communication import Member, members
from shardc.program.program import Program

from .process_group import join, split

Tensors = Sequence[Tensor]  # one for each rank in this process
Results = Callable[[], Tensors]  # waits for a collective, and returns its results
Places = Sequence[Tensor | None]  # tensors that results may be written to; empty, or one for each result
Rows = Sequence[Sequence[Tensor]]  # for each rank in this process, one tensor for each value of a bucket
PartNames = tuple[str, ...]  # axis parts as printed, major first

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Comm(Protocol):
    """Runs collectives over the ranks of a mesh; those at ``positions`` are in this process.

    ``traffic`` counts the calls and bytes that each of these ranks sends, in the order of ``positions``.
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
    def gathers_in_place(self) -> bool:
        """Whether results are written to the tensors of ``into``."""

    def ranks(self, axes: PartNames) -> tuple[int, ...]:
        """The ranks of the job that exchange values along axes with the first rank of this process."""

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Start the collective ``kind``, with the arguments of its function in shardc/program/collective.py.

        Returns a function that waits for the results. In groups of one rank it does nothing. ``is_own``: nobody else
        reads the operands, so that their memory may be reused.
        """

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """Start one collective for all values of a bucket."""

    def rotate(self, rows: Rows, axes: PartNames, by: int = 1) -> Callable[[], Rows]:
        """Start to send each rank's tensors ``by`` indices further in its group. The result: the received tensors."""


@dataclass(slots=True)
class Traffic:
    """The calls and the sent bytes of one rank, by kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: CollectiveKind, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes

    def clear(self) -> None:
        """Set all counters to zero."""
        self.calls.clear()
        self.bytes.clear()


class LocalCollectives:
    """The kinds of collectives that send nothing; every ``Comm`` shares them."""

    mesh: Mesh
    positions: tuple[int, ...]

    def ranks(self, axes: PartNames) -> tuple[int, ...]:
        """The ranks of the job that exchange values along axes with the first rank of this process."""
        groups = self.mesh.groups(parse_parts(axes, self.mesh))
        return tuple(self.mesh.rank(each) for each in next(group for group in groups if self.positions[0] in group))

    def shard_slice(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors:
        """Each rank keeps a copy of its piece, so that the rest can be freed."""
        count, indices = _indices(self.mesh, axes, self.positions)
        if count == 1:
            return xs
        pieces = (chunk(x, count, dim, index) for x, index in zip(xs, indices, strict=True))
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]

    def mask_padding(self, xs: Tensors, axes: PartNames, dim: int, size: int, inner: int, fill: float) -> Tensors:
        """Each rank fills the padding of its shard with ``fill``."""
        parts = parse_parts(axes, self.mesh)
        full = ceil_div(size, num_shards(parts))
        lengths = [chunk_of(size, parts, self.mesh, position)[1] for position in self.positions]
        return [fill_padding(x, dim, inner, full, length, fill) for x, length in zip(xs, lengths, strict=True)]


@functools.lru_cache(maxsize=1024)
def _indices(mesh: Mesh, axes: PartNames, positions: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The number of pieces into which axes cut a dim, and the index of the piece at each position."""
    parts = parse_parts(axes, mesh)
    return num_shards(parts), tuple(mesh.index(position, parts) for position in positions)


def chunk(x: Tensor, count: int, dim: int, index: int) -> Tensor:
    """One of ``count`` equal pieces along a dim, as a view."""
    size, rest = divmod(x.shape[dim], count)
    assert not rest, (tuple(x.shape), dim, count)
    return x.narrow(dim, index * size, size)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The layout of a bucket's values in one buffer.

    ``parts``: the collective of each value. ``shapes``: those of one rank's operands. ``count``: the number of ranks in
    a group.
    """

    parts: tuple[Member, ...]
    shapes: tuple[tuple[int, ...], ...]
    count: int

    @staticmethod
    def of(program: Program, node: fx.Node) -> BucketLayout:
        """The layout of a bucket of a localized program."""
        assert program.mesh is not None
        parts = members(node)
        shapes = tuple(program.value_type(program.value(part.operand)).shape for part in parts)
        return BucketLayout(parts, shapes, group_size(program.mesh, parts[0].kind, parts[0].args))

    @property
    def kind(self) -> CollectiveKind:
        """The kind of the collective, which all values share."""
        return self.parts[0].kind

    @property
    def args(self) -> tuple[object, ...]:
        """The arguments of the buffer's own collective."""
        axes, *rest = self.parts[0].args
        along = {"all_reduce": rest, "reduce_scatter": [*rest[:1], 0], "all_gather": [0]}
        return axes, *along[self.kind]

    def places(self, like: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """A new buffer for an all_reduce, and its flat piece for each value."""
        sizes = [math.prod(shape) for shape in self.shapes]
        buffer = like.new_empty(sum(sizes))
        return buffer, buffer.split(sizes)

    def pack(self, xs: Sequence[Tensor]) -> Tensor:
        """The values in one buffer: flat; for a reduce_scatter a row for each rank, for an all_gather one row."""
        if self.kind == "all_reduce":
            return torch.cat([x.reshape(-1) for x in xs])
        if self.kind == "all_gather":
            return torch.cat([x.reshape(1, -1) for x in xs], 1)
        pairs = zip(xs, self.parts, strict=True)
        return torch.cat([split(x, self.count, part.args[2]).flatten(1) for x, part in pairs], 1)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The result of each value's collective; views of the buffer if possible."""
        rows = buffer if buffer.dim() == 2 else buffer.unsqueeze(0)
        share = self.count if self.kind == "reduce_scatter" else 1
        pieces = rows.split([math.prod(shape) // share for shape in self.shapes], 1)
        results = []
        for piece, part, shape in zip(pieces, self.parts, self.shapes, strict=True):
            if part.kind == "all_gather":  # a view would keep the whole buffer alive
                results.append(join(piece.reshape(self.count, *shape), part.args[1]).contiguous())
                continue
            if part.kind == "reduce_scatter":
                shape = tuple(size // self.count if dim == part.args[2] else size for dim, size in enumerate(shape))
            results.append(piece.view(shape))
        return results


def put(places: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copy values to their flat pieces of a buffer."""
    torch._foreach_copy_(list(places), [x.reshape(-1) for x in xs])


def start_packed(comm: Comm, layout: BucketLayout, buffers: Sequence[Tensor]) -> Callable[[], Rows]:
    """Start the collective of a bucket that each rank has packed into a buffer."""
    finish = comm.start(layout.kind, buffers, *layout.args, is_own=True)
    return lambda: [layout.unpack(buffer) for buffer in finish()]
