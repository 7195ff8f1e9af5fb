"""Parameters as they are computed on, where they are stored otherwise: made when one was written, kept until then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .optimizer import StepWatcher

Parameters = Mapping[str, Tensor]
Pieces = list[Tensor]  # one for each rank that lives in this process
Made = dict[str, Pieces]  # by the parameter's name


class Copies(StepWatcher):
    """What is made of stored parameters.

    State: ``_made``; ``_written`` and ``_read``, versions of the parameters and of their gradients when it was known to
    hold.

    A write is seen by the version of the parameter or of its memory, by a step of an optimizer that holds it, and by
    its gradient, which no one but a backward touches between two steps. Every rank sees the same, since all run one
    program.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: Made = {}
        self._written: tuple[Any, ...] = ()
        self._read: tuple[Any, ...] = ()

    def get(self, parameters: Parameters, starts: Mapping[str, int], make: Callable[[Made], Made]) -> Made:
        """The pieces of these parameters; ``make`` is called for them if need be, and writes into those it is given.

        ``starts``: the row from which on what is made of a parameter is the parameter's own piece; they share memory.
        """
        self.watch(parameters.values())
        is_known = parameters.keys() <= self._made.keys() and self._written == self._versions()
        if not is_known or self._read != self._gradients():
            self._made |= {name: list(map(_dense, pieces)) for name, pieces in make(self._made).items()}
            for name, start in starts.items():
                _share_memory(_piece(parameters[name]), self._made[name][0], start)
            self._written = self._versions()
        self._read = self._gradients()
        return self._made

    def forget(self) -> None:
        """Make them anew next time."""
        self._written = ()

    def note_backward(self) -> None:
        """Gradients are as a backward has left them."""
        self._read = self._gradients()

    def note_step(self) -> None:
        """An optimizer has written parameters."""
        self.forget()

    def _versions(self) -> tuple[Any, ...]:
        return tuple((t._version, _piece(t)._version, _piece(t).data_ptr()) for t in self.watched())

    def _gradients(self) -> tuple[Any, ...]:
        return tuple(None if t.grad is None else (id(t.grad), t.grad._version) for t in self.watched())


def _piece(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _dense(made: Tensor) -> Tensor:
    """In memory of its own, in order."""
    is_dense = made.is_contiguous() and made.untyped_storage().nbytes() == made.nbytes
    return made if is_dense else made.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _share_memory(piece: Tensor, made: Tensor, start: int) -> None:
    """Let a piece be rows of what was made of it and others."""
    rows = made[start : start + len(piece)]
    if piece.is_contiguous() and piece.data_ptr() != rows.data_ptr():
        piece.set_(made.untyped_storage(), rows.storage_offset(), piece.shape, piece.stride())
