"""Gradients whose sum over ranks is still open: it is closed when someone reads one, for all of them at once.

``backward`` may run many times before a gradient is read (gradient accumulation). What each run has for the sum is
added on its rank; the collectives run once, at the first read: the optimizer's step, clipping, a print. Once it was
seen how many backwards there are before a read, sums are closed in the last of them, among its other ops.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, preserve_format
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardc.language.errors import OrderError

from ..comm.dtensor import new_dtensor
from ..execute.deferred import Sums, Totals
from ..execute.interpreter import Values
from .optimizer import StepWatcher

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


def is_accumulated(node: Any) -> bool:
    """Whether the backward that runs adds to ``.grad`` there; not so ``autograd.grad``, nor one of other ``inputs``."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad of a leaf
        return False


def once_only(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, where a graph of them is made (``create_graph``): a RuntimeError if someone goes through it."""
    refuse: Any = torch._C._functions.DelayedError(
        b"a gradient of a parallel model has no gradient itself: leave create_graph out", len(gradients)
    )
    refused = refuse(*(gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients))
    return tuple(refused)


def handed_over(
    gradients: Sequence[Tensor | None], values: Sequence[Tensor | None], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """The gradients that are left for autograd, where those of parameters are set that have none yet, or an open one.

    ``values``: the inputs that the gradients are of; ``nodes`` of autograd: where these would be passed on to, in a
    list that alone holds them. Autograd would detach each gradient first, which for a DTensor costs more than a small
    op. What hooks are to see is left, also where someone holds a node, who may have given it a hook.
    """
    holders, unheld = list(map(sys.getrefcount, nodes)), _unheld()
    left, is_all = list(gradients), is_accumulated(_other_node())
    for i, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
        if isinstance(gradient, DTensor) and isinstance(value, DTensor) and holders[i] == unheld:
            if _is_free(value) and (is_all or is_accumulated(nodes[i])) and _is_set(value, gradient):
                left[i] = None
    return left


@cache
@torch.enable_grad()
def _unheld() -> int:
    """How many hold a node in a list of nodes, if no one holds it beside."""
    leaf = torch.zeros((), requires_grad=True)
    made_by: Any = leaf.view_as(leaf).grad_fn
    nodes = [node for node, _ in made_by.next_functions]
    return next(map(sys.getrefcount, nodes))


@cache
@torch.enable_grad()
def _other_node() -> Any:
    """A leaf's node that is in no one's graph: a backward of all leaves would run it too."""
    return torch.zeros((), requires_grad=True).view(()).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _is_free(leaf: Tensor) -> bool:
    """Whether no one is told of its gradient."""
    return leaf.is_leaf and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def _is_set(leaf: DTensor, gradient: DTensor) -> bool:
    """Whether a leaf has its gradient now, with nothing to be computed."""
    before = leaf.grad
    if before is None and gradient.stride() == leaf.stride():
        leaf.grad = gradient
        return True
    return isinstance(before, DTensor) and join(before, gradient)


def rows_apart(
    rows: Sequence[Values], tangents: Sequence[Values], alone: Container[int] = ()
) -> list[list[Tensor | None]]:
    """For each position its gradients apart; those of all microbatches of a pipeline are one row's.

    ``alone``: by index, those known to be in memory of their own.
    """
    found: dict[tuple[int, ...], list[Tensor | None]] = {}
    keys = [tuple(map(id, (*row, *given))) for row, given in zip(rows, tangents, strict=True)]
    for key, row, given in zip(keys, rows, tangents, strict=True):
        if key not in found:
            found[key] = apart(row, given, alone)
    return [found[key] for key in keys]


def apart(gradients: Values, tangents: Values, alone: Container[int] = ()) -> list[Tensor | None]:
    """Gradients each in memory of its own: torch adds to them and scales them in place."""
    others = [each for i, each in enumerate(gradients) if each is not None and i not in alone]
    if _are_apart([*others, *(each for each in tangents if each is not None)]):
        return list(gradients)
    taken: dict[int, list[tuple[int, int]]] = {}  # stretches by storage, in order: a bucket holds many gradients
    for tangent in tangents:
        if tangent is not None:
            _take(tangent, taken)
    return [
        gradient if gradient is None or _take(gradient, taken) else gradient.clone(memory_format=preserve_format)
        for gradient in gradients
    ]


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two lie in the same memory, as is seen without asking which memory it is."""
    stretches = sorted((each.data_ptr(), each.nbytes) for each in tensors if each.numel())
    is_dense = all(each.is_contiguous() for each in tensors)
    return is_dense and all(start + size <= other for (start, size), (other, _) in pairwise(stretches))


def _take(tensor: Tensor, taken: dict[int, list[tuple[int, int]]]) -> bool:
    """Note the stretch of memory that a tensor lies in, unless part of it is taken: then it is not free."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = tensor.numel() if tensor.is_contiguous() else sum((size - 1) * stride for size, stride in extents) + 1
    start = tensor.data_ptr()
    end = start + max(0, reach) * tensor.itemsize
    stretches = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
    at = bisect_left(stretches, (start, start))
    is_free = (at == 0 or stretches[at - 1][1] <= start) and (at == len(stretches) or end <= stretches[at][0])
    if is_free:
        stretches.insert(at, (start, end))
    return is_free
