"""One dim of an op that is taken apart: its windows and chunks, moved into the batch and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.language.size import plain
from shardc.language.windows import Windows, overlap_add, rows_sent, windows
from shardc.program.node import operands

from ..emitter import Emitter

aten = torch.ops.aten

T = TypeVar("T")
Results = fx.Node | list[fx.Node | None]


@dataclass(frozen=True, slots=True)
class Along:
    """An op to be taken apart along a dim that is cut in ``count`` chunks.

    ``chosen``: the op in the program before the rewrite, which still has its shardings. ``nested``: the size of each
    axis if several cut the dim and do not divide it, so that each cuts the shards of those before it; else empty.
    """

    emit: Emitter
    dim: int
    count: int
    chosen: Emitter | None = None
    nested: tuple[int, ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """The op's arguments."""
        return self.emit.given

    @property
    def node(self) -> fx.Node:
        """The op."""
        return self.emit.node

    @property
    def ndim(self) -> int:
        """The number of dims of the op's tensors."""
        first = operands(self.node)[0]
        assert first is not None
        return len(self.emit.shape(first))

    def at(self, entries: Sequence[T]) -> T:
        """The entry for this dim; ``entries`` has one for each of the last dims."""
        return entries[self.dim - self.ndim]

    def without(self, numbers: Sequence[int], number: int = 0) -> list[int]:
        """The numbers, with ``number`` for this dim."""
        return [number if i == self.dim - self.ndim + len(numbers) else old for i, old in enumerate(numbers)]

    def size(self, node: fx.Node) -> int:
        """The size of the dim."""
        return self.emit.shape(node)[self.dim]

    def padded(self, x: fx.Node, before: int, after: int) -> fx.Node:
        """``x`` with zeros added at either end of the dim; a negative number cuts elements off."""
        behind = [0, 0] * (self.ndim - 1 - self.dim)
        return self.emit(aten.constant_pad_nd.default, x, [*behind, before, after])

    def apart(self, x: fx.Node, window: Windows, fill: float = 0.0) -> fx.Node:
        """The windows of ``x``, with a new dim over windows before the dim."""
        joined = x if window.is_identity else self.emit(windows, x, (), self.dim, window.values, fill)
        shape = self.emit.shape(joined)
        split = [*shape[: self.dim], self.count, window.size, *shape[self.dim + 1 :]]
        return self.emit(aten.reshape.default, joined, split)

    def merge(self, x: fx.Node, order: Sequence[int], shape: Sequence[int]) -> fx.Node:
        """``x`` with its dims permuted by ``order``, in ``shape``."""
        return self.emit(aten.reshape.default, self.emit(aten.permute.default, x, list(order)), list(shape))

    def windows(self, x: fx.Node, window: Windows, fill: float = 0.0) -> fx.Node:
        """The windows of ``x``, as the major part of the batch dim."""
        apart = self.apart(x, window, fill)
        shape = list(self.emit.shape(apart))
        order = [self.dim, *(i for i in range(len(shape)) if i != self.dim)]
        del shape[self.dim]
        return self.merge(apart, order, [shape[0] * self.count, *shape[1:]])

    def chunks(self, x: fx.Node, fill: float = 0.0) -> fx.Node:
        """The chunks of ``x``, as the major part of the batch dim."""
        return self.windows(x, self.chunks_of(self.size(x)), fill)

    def chunks_of(self, size: int) -> Windows:
        """The chunks of a dim of ``size``, as windows."""
        return Windows(self.count, size, size, 0)

    def overlap_add(self, x: fx.Node, window: Windows) -> fx.Node:
        """The adjoint of ``windows``: from windows in the batch dim to a dim of ``window.length`` elements."""
        shape = list(self.emit.shape(x))
        apart = self.emit(aten.reshape.default, x, [self.count, shape[0] // self.count, *shape[1:]])
        order = [*range(1, self.dim + 1), 0, *range(self.dim + 1, len(shape) + 1)]
        shape[0], shape[self.dim] = shape[0] // self.count, self.count * shape[self.dim]
        return self._added(self.merge(apart, order, shape), window)

    def beside(self, x: fx.Node, window: Windows) -> fx.Node:
        """The adjoint of ``apart``: from a dim over windows to a dim of ``window.length`` elements."""
        shape = list(self.emit.shape(x))
        shape[self.dim : self.dim + 2] = [shape[self.dim] * shape[self.dim + 1]]
        return self._added(self.emit(aten.reshape.default, x, shape), window)

    def _added(self, x: fx.Node, window: Windows) -> fx.Node:
        return x if window.is_identity else self.emit(overlap_add, x, (), self.dim, window.values)

    def join(self, x: fx.Node, size: int) -> fx.Node:
        """The inverse of ``chunks``, to a dim of ``size``."""
        return self.overlap_add(x, self.chunks_of(size))


Reach = Callable[[Along], Sequence[tuple[Windows, TensorType]]]  # windows, and the type of the tensor that each is of


@dataclass(frozen=True, slots=True)
class Windowed:
    """The form of an op in windows. ``reach``: its windows, none if it has no such form along the dim.

    ``expand``: emits the form. ``piece``: a factor that counts the equal pieces of a dim, which are windows of the dim
    too. ``nests``: whether the chunks may come from several axes that do not divide the dim.
    """

    reach: Reach
    expand: Callable[[Along], Results]
    piece: str = ""
    nests: bool = False

    def moved(self, along: Along) -> int | None:
        """Bytes of the windowed tensors' edges that all ranks together send; None if the op cannot be taken apart."""
        reach = self.reach(along)
        pairs = [(tuple(map(plain, window.values)), type_.nbytes) for window, type_ in reach]
        rows = [sum(rows_sent(values)[0]) * (nbytes // max(1, Windows(*values).length)) for values, nbytes in pairs]
        return sum(rows) if reach else None

    def ways(self, along: Along) -> list[tuple[str, int]]:
        """The ways to compute an op that has several, in words, with the bytes a rank sends; the chosen one first."""
        return []


def windowed(
    window_of: Callable[[Along], Windows | None],
    expand: Callable[[Along, Windows], Results],
    piece: str = "",
    tensor: str = "self",
) -> Windowed:
    """An op with windows of one tensor: the argument ``tensor``, or in backward the gradient of it that is returned.

    ``window_of``: returns None if the op cannot be taken apart along the dim.
    """

    def reach(along: Along) -> list[tuple[Windows, TensorType]]:
        window = window_of(along)
        return [] if window is None else [(window, along.emit.type(along.given.get(tensor, along.node)))]

    def expand_windows(along: Along) -> Results:
        window = window_of(along)
        assert window is not None, along.node
        return expand(along, window)

    return Windowed(reach, expand_windows, piece)
