"""Halo exchanges, of edges between neighbours along a cut dim: the pieces that a rank sends, and the result it joins.

Pure functions of tensors and of the rank's index in its group; every ``Comm`` sends the result of ``pieces``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.language.windows import Windows, moves_rows, segments

HALO_KINDS = ("windows", "overlap_add", "rechunk")
Pieces = Sequence[Tensor]  # the tensors that one rank sends to another, in the order of their segments


def exchange_of(kind: str, dim: int, values: tuple[int, ...], *args: Any) -> Exchange:
    """The exchange of a collective of ``HALO_KINDS``, from its arguments after the axes."""
    if kind == "overlap_add":
        return OverlapExchange(values, dim)
    return WindowExchange(values, dim, args[0] if kind == "windows" else 0)


@dataclass(frozen=True, slots=True)
class Exchange(ABC):
    """An exchange along ``dim`` within a group. ``values``: the fields of its ``Windows``."""

    values: tuple[int, ...]
    dim: int

    @property
    def moves(self) -> bool:
        """Whether any rank sends something to another."""
        return moves_rows(self.values)

    @abstractmethod
    def pieces(self, x: Tensor, index: int) -> list[Pieces]:
        """The rows that the rank at ``index`` sends to each rank of the group, itself included."""

    @abstractmethod
    def lengths(self, index: int) -> list[list[int]]:
        """The lengths along ``dim`` of the pieces that the rank at ``index`` receives from each rank."""

    @abstractmethod
    def join(self, x: Tensor, index: int, received: Sequence[Pieces]) -> Tensor:
        """The result of the rank at ``index``, from its operand and the pieces received from each rank."""


@dataclass(frozen=True, slots=True)
class WindowExchange(Exchange):
    """Each rank gets its window of a dim: chunks in, windows out."""

    fill: float

    def pieces(self, x: Tensor, index: int) -> list[Pieces]:
        """The parts of our chunk that lie in each rank's window."""
        return [
            [x.narrow(self.dim, segment.start, segment.length) for segment in window if segment.source == index]
            for window in segments(self.values)
        ]

    def lengths(self, index: int) -> list[list[int]]:
        """The lengths of each rank's parts of our window."""
        window = segments(self.values)[index]
        return [[segment.length for segment in window if segment.source == source] for source in range(self.values[0])]

    def join(self, x: Tensor, index: int, received: Sequence[Pieces]) -> Tensor:
        """Our window: the pieces in order, with ``fill`` between them."""
        pieces, parts, end = [iter(each) for each in received], list[Tensor](), 0
        for segment in segments(self.values)[index]:
            parts += [self._filled(x, segment.at - end), next(pieces[segment.source])]
            end = segment.at + segment.length
        parts.append(self._filled(x, Windows(*self.values).size - end))
        present = [part for part in parts if part.shape[self.dim]]
        return torch.cat(present or parts[-1:], self.dim)

    def _filled(self, x: Tensor, length: int) -> Tensor:
        return x.new_full(_resized(x, self.dim, length), self.fill)


@dataclass(frozen=True, slots=True)
class OverlapExchange(Exchange):
    """Each rank gets the sum of all windows over its chunk: windows in, chunks out."""

    def pieces(self, x: Tensor, index: int) -> list[Pieces]:
        """The parts of our window that lie in each rank's chunk."""
        window = segments(self.values)[index]
        return [
            [x.narrow(self.dim, segment.at, segment.length) for segment in window if segment.source == source]
            for source in range(self.values[0])
        ]

    def lengths(self, index: int) -> list[list[int]]:
        """The lengths of the parts of each rank's window that lie in our chunk."""
        return [[segment.length for segment in window if segment.source == index] for window in segments(self.values)]

    def join(self, x: Tensor, index: int, received: Sequence[Pieces]) -> Tensor:
        """Our chunk: the sum of the pieces, each at its place and zero around it."""
        size, behind = Windows(*self.values).shard_size, x.dim() - 1 - self.dim
        total = x.new_zeros(_resized(x, self.dim, size))
        for window, pieces in zip(segments(self.values), received, strict=True):
            ours = (segment for segment in window if segment.source == index)
            for segment, piece in zip(ours, pieces, strict=True):
                around = [0, 0] * behind + [segment.start, size - segment.start - segment.length]
                total = total + torch.nn.functional.pad(piece, around)
        return total


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if i == dim else old for i, old in enumerate(x.shape)]
