"""Gradients whose sum over ranks is still open: it is closed when someone reads one, for all of them at once.

``backward`` may run many times before a gradient is read (gradient accumulation). What each run has for the sum is
added on its rank; the collectives run once, at the first read: the optimizer's step, clipping, a print. Where every
backward is followed by a read, as was seen at the first one, sums are closed in the backward, among its other ops.
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

from .executor import Sums
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
    what is here, and added its own backward's. ``close``: runs the collectives. ``parameters`` have the gradients.
    """

    def __init__(self, sums: Sums, close: Close, parameters: Sequence[Tensor], before: OpenSums | None = None) -> None:
        earlier: Sums = [] if before is None else before._sums
        self._sums: Sums = before._added(sums) if before is not None and earlier else sums
        self._close, self._is_own = close, bool(earlier)
        self._kept: Mapping[int, Tensor] = {} if before is None else before._kept
        self._results: Mapping[int, Tensor] = {}
        self._holders = [weakref.ref(parameter) for parameter in parameters]
        self.following: OpenSums | None = None
        if before is not None:
            before._sums, before.following = [], self

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

    def result(self, index: int) -> Tensor:
        """A gradient's piece on this rank. Whoever holds one of the gradients then holds its piece itself."""
        if self.following is not None:
            return self.following.result(index)
        if not self._results:
            sums, self._sums = self._sums, []
            self._results = self._close(sums)
            if self._kept:
                kept = [self._kept[i] for i in self._results]
                torch._foreach_add_(kept, list(self._results.values()))
                self._results = dict(zip(self._results, kept, strict=True))
            for parameter in self._holders:
                self._settle(parameter())
        return self._results[index]

    def _added(self, sums: Sums) -> Sums:
        """The sums with others added to them; in place where no one else holds them."""
        for mine, others in zip(self._sums, sums, strict=True):
            ours, theirs = list(mine.values()), [others[key] for key in mine]
            if self._is_own:
                torch._foreach_add_(ours, theirs)
            else:
                mine.update(zip(mine, torch._foreach_add(ours, theirs), strict=True))
        return self._sums

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
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    spec = replace(parameter._spec, tensor_meta=parameter._spec.tensor_meta._replace(dtype=dtype))
    return new_dtensor(OpenGradient(sums, index, parameter._local_tensor, dtype), spec)


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
