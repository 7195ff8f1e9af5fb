"""What a rank gives to each rank of its group so that all have their windows of a dim, and how it joins what it takes.

Pure functions of tensors and of the rank's index in the group: both runtimes send what ``pieces`` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardc.language.windows import Segment, Windows, moves_rows, segments

Pieces = Sequence[Tensor]  # what one rank gives to one other, in the order of its segments


class Exchange(Protocol):
    """An exchange in a group: ``pieces`` to be sent by the rank at ``index`` to each, ``shapes`` of those it takes."""

    @property
    def dim(self) -> int: ...
    @property
    def moves(self) -> bool: ...
    def pieces(self, x: Tensor, index: int) -> list[Pieces]: ...
    def lengths(self, index: int) -> list[list[int]]: ...
    def join(self, x: Tensor, index: int, taken: Sequence[Pieces]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WindowExchange:
    """Chunks of a dim in, windows out."""

    values: tuple[int, ...]
    dim: int
    fill: float

    @property
    def moves(self) -> bool:
        """Whether any rank gives anything to another."""
        return moves_rows(self.values)

    def pieces(self, x: Tensor, index: int) -> list[Pieces]:
        """What each window has of our chunk."""
        return [
            [x.narrow(self.dim, segment.start, segment.length) for segment in found if segment.source == index]
            for found in segments(self.values)
        ]

    def lengths(self, index: int) -> list[list[int]]:
        """How much of each chunk our window has."""
        found = segments(self.values)[index]
        return [[segment.length for segment in found if segment.source == source] for source in range(self.values[0])]

    def join(self, x: Tensor, index: int, taken: Sequence[Pieces]) -> Tensor:
        """Our window: the pieces in order, and what is filled in between."""
        left, parts, at = [iter(pieces) for pieces in taken], [], 0
        for segment in segments(self.values)[index]:
            parts += [self._filled(x, segment.at - at), next(left[segment.source])]
            at = segment.at + segment.length
        parts.append(self._filled(x, Windows(*self.values).size - at))
        present = [part for part in parts if part.shape[self.dim]]
        return torch.cat(present or parts[-1:], self.dim)

    def _filled(self, x: Tensor, length: int) -> Tensor:
        return x.new_full(_resized(x, self.dim, length), self.fill)


@dataclass(frozen=True, slots=True)
class OverlapExchange:
    """Windows of a dim in, chunks out."""

    values: tuple[int, ...]
    dim: int

    @property
    def moves(self) -> bool:
        """Whether any rank gives anything to another."""
        return moves_rows(self.values)

    def pieces(self, x: Tensor, index: int) -> list[Pieces]:
        """What our window has of each chunk."""
        found = segments(self.values)[index]
        return [
            [x.narrow(self.dim, segment.at, segment.length) for segment in found if segment.source == source]
            for source in range(self.values[0])
        ]

    def lengths(self, index: int) -> list[list[int]]:
        """How much each window has of our chunk."""
        return [[segment.length for segment in found if segment.source == index] for found in segments(self.values)]

    def join(self, x: Tensor, index: int, taken: Sequence[Pieces]) -> Tensor:
        """Our chunk: the sum of the pieces, window by window."""
        size = Windows(*self.values).shard_size
        total = x.new_zeros(_resized(x, self.dim, size))
        for found, pieces in zip(segments(self.values), taken, strict=True):
            ours = (segment for segment in found if segment.source == index)
            for segment, piece in zip(ours, pieces, strict=True):
                total = total + _placed(piece, self.dim, segment, size)
        return total


def _placed(piece: Tensor, dim: int, segment: Segment, size: int) -> Tensor:
    """The piece at its place in a chunk, zeros around it."""
    behind = piece.dim() - 1 - dim
    return torch.nn.functional.pad(piece, [0, 0] * behind + [segment.start, size - segment.start - segment.length])


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if i == dim else old for i, old in enumerate(x.shape)]
