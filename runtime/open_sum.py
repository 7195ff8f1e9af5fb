"""Gradients whose sum over ranks is still open: it is closed when someone reads one, for all of them at once.

``backward`` may run many times before a gradient is read (gradient accumulation). What each run has for the sum is
added on its rank; the collectives run once, at the first read: the optimizer's step, clipping, a print. Once it was
seen how many backwards there are before a read, sums are closed in the last of them, among its other ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardc.error import OrderError

from .deferred import Sums, Totals
from .optimizer_steps import StepWatcher
from .placement import new_dtensor

aten = torch.ops.aten
Close = Callable[[Sums], Mapping[int, Tensor]]


class Accumulation(StepWatcher):
    """How many backwards there are before a gradient is read.

    State: ``_count`` of them since gradients were cleared or stepped; ``_expected``, how many there were last time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = self._expected = 0

    def may_wait(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the sums of the backward that begins may stay open, for another may follow before they are read."""
        if any(parameter.grad is None for parameter in parameters):
            self._count = 0
        self.watch(parameters)
        self._count += 1
        return not self._count == self._expected == 1

    @property
    def is_last(self) -> bool:
        """Whether the backward that runs is the last before a read, if it goes as it went before."""
        return self._count == self._expected

    def note_read(self) -> None:
        """A gradient is read whose sum was open."""
        self._expected = self._count

    def note_step(self) -> None:
        """The next backward is the first again."""
        self._count = 0


class OpenSums:
    """What one or more backwards of one program have for their gradients.

    State: ``_sums`` until they are closed, then ``_results``, by place among the program's outputs; ``_kept``, what the
    gradients were before, to which the sums are added when they are closed; ``following``, the object that took over
    what is here, with its own backward's in it. ``close``: runs the collectives. ``parameters`` have the gradients.
    ``is_own``: no one else has the sums' memory. ``_is_taken``: a backward has taken the sums, to add to them.
    """

    def __init__(
        self,
        sums: Sums,
        close: Close,
        parameters: Sequence[Tensor],
        before: OpenSums | None = None,
        is_own: bool = False,
    ) -> None:
        self._sums, self._close, self._is_own = sums, close, is_own
        self._kept: Mapping[int, Tensor] = {} if before is None else before._kept
        self._results: Mapping[int, Tensor] = {}
        self._is_taken = False
        self._holders = [weakref.ref(parameter) for parameter in parameters]
        self.following: OpenSums | None = None
        if before is not None:
            before.following = self

    @staticmethod
    def of_kept(parameters: Mapping[int, Tensor], close: Close) -> OpenSums | None:
        """Nothing to be summed yet, beside gradients that are whole already; None where one is missing, or is no piece.

        A ``zero_grad(set_to_none=False)`` leaves such. They keep their memory, and their objects.
        """
        pieces = {i: _whole_piece(parameter) for i, parameter in parameters.items()}
        kept = {i: piece for i, piece in pieces.items() if piece is not None}
        if len(kept) < len(pieces):
            return None
        sums = OpenSums([], close, list(parameters.values()))
        sums._kept = kept
        for i, parameter in parameters.items():
            parameter.grad._local_tensor = OpenGradient(sums, i, kept[i], kept[i].dtype)  # type: ignore[union-attr]
        return sums

    def is_open(self, close: Close) -> bool:
        """Whether no one has read a gradient yet, and ``close`` is what will close the sums."""
        return bool(self._sums) and self._close == close

    def take(self) -> Totals | None:
        """What is open, for a backward that adds to it and whose own open sums follow these; None without any."""
        sums, self._sums = self._sums, []
        self._is_taken = bool(sums)
        return Totals(sums, self._is_own) if sums else None

    def result(self, index: int) -> Tensor:
        """A gradient's piece on this rank. Whoever holds one of the gradients then holds its piece itself."""
        if self.following is not None:
            return self.following.result(index)
        if self._is_taken:
            what, problem = "which several backwards add to", "one of them has failed"
            raise OrderError("a gradient", what, problem, "call zero_grad, and begin again with the first")
        if not self._results:
            sums, self._sums = self._sums, []
            self.end(self._close(sums) if sums else {})
            for parameter in self._holders:
                self._settle(parameter())
        return self._results[index]

    def end(self, results: Mapping[int, Tensor]) -> None:
        """Know what the gradients are: what came out of the collectives, and what there was before."""
        if self._kept and results:
            torch._foreach_add_([self._kept[i] for i in results], list(results.values()))
        self._results = self._kept or results

    @property
    def is_closed(self) -> bool:
        """Whether it is known what the gradients are."""
        return bool(self._results)

    def _settle(self, parameter: Tensor | None) -> None:
        gradient = None if parameter is None else parameter.grad
        if isinstance(gradient, DTensor) and isinstance(gradient._local_tensor, OpenGradient):
            open_gradient = gradient._local_tensor
            if open_gradient.sums is self:
                gradient._local_tensor = self.result(open_gradient.place)


class OpenGradient(Tensor):
    """The piece of one gradient, not summed over ranks yet; any op but an addition of such closes the sum."""

    sums: OpenSums
    place: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, sums: OpenSums, place: int, like: Tensor, dtype: torch.dtype) -> OpenGradient:
        """``like``: a tensor of the piece's shape and device."""
        made: OpenGradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.sums, made.place = sums, place
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.sums.result(self.place))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on what the gradients are when their sums are closed."""
        if func in (aten.detach.default, aten.alias.default):
            return OpenGradient(args[0].sums, args[0].place, args[0], args[0].dtype)
        if func is aten.add_.Tensor and _is_joined(*args[:2]):
            args[0].sums = args[1].sums
            return args[0]
        args, kwargs = pytree.tree_map_only(
            OpenGradient, lambda each: each.sums.result(each.place), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def open_gradient(sums: OpenSums, index: int, parameter: Tensor) -> DTensor:
    """The gradient of a parameter, which lies as the parameter does, in the dtype of its gradients."""
    assert isinstance(parameter, DTensor) and parameter._spec.tensor_meta is not None, type(parameter)
    spec, dtype = parameter._spec, getattr(parameter, "grad_dtype", None) or parameter.dtype
    if dtype != parameter.dtype:
        spec = replace(spec, tensor_meta=parameter._spec.tensor_meta._replace(dtype=dtype))
    return new_dtensor(OpenGradient(sums, index, parameter._local_tensor, dtype), spec)


def join(accumulated: DTensor, added: DTensor) -> bool:
    """Let an open gradient be what is added to it, where that holds it already; whether that is so."""
    mine, other = accumulated._local_tensor, added._local_tensor
    if not _is_joined(mine, other):
        return False
    mine.sums = other.sums  # type: ignore[attr-defined]
    if mine.sums.is_closed:  # type: ignore[attr-defined]
        accumulated._local_tensor = mine.sums.result(mine.place)  # type: ignore[attr-defined]
    return True


def open_sums_of(parameters: Sequence[Tensor], close: Close) -> OpenSums | None:
    """The open sums, closed by ``close``, that the gradients of all of these are of; None where there are no such."""
    pieces = [parameter.grad._local_tensor for parameter in parameters if isinstance(parameter.grad, DTensor)]
    found = [piece.sums for piece in pieces if isinstance(piece, OpenGradient) and piece.sums.is_open(close)]
    is_one = len(found) == len(parameters) and all(sums is found[0] for sums in found)
    return found[0] if is_one else None


def _whole_piece(parameter: Tensor) -> Tensor | None:
    """The piece of a gradient that lies as its parameter does and has no open sum."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return None
    is_alike = gradient.placements == parameter.placements and not gradient.requires_grad
    piece = gradient._local_tensor
    return piece if is_alike and type(piece) is Tensor else None


def _is_joined(accumulated: Any, added: Any) -> bool:
    """Whether what is added holds what was accumulated already."""
    is_open = isinstance(accumulated, OpenGradient) and isinstance(added, OpenGradient)
    return is_open and accumulated.sums.following is added.sums
