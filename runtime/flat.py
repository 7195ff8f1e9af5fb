"""A bucket's flat buffer: local values packed into one tensor, a collective of it, and what each makes of the result.

A collective that cuts or joins a dim acts on the buffer as on rows, one for each rank of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from shardc.bucket import Member, members
from shardc.collective import Kind, group_size
from shardc.program import Program

from .functional import join, split

if TYPE_CHECKING:
    from .comm import Starter

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
    def kind(self) -> Kind:
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
