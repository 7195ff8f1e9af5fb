"""Gradient accumulation: the reductions of gradients over ranks run once for several backwards.

``backward`` may run many times before a gradient is read. Each run adds to sums on its own rank. The collectives run
once, for all gradients, when one of them is read: by the optimizer's step, clipping, a print. Once the number of
backwards before a read is known, the collectives run in the last of them, overlapped with its other ops.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, preserve_format
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from shardc.language.errors import OrderError

from ..execute.deferred import Sums, Totals
from ..execute.executor import Rows
from ..execute.part import Values
from ..tensor.global_tensor import GlobalTensor, new_global_tensor
from ..tier.stepping import SteppingInBackward
from .optimizer import StepWatcher

aten = torch.ops.aten
Reduce = Callable[[Sums], Mapping[int, Tensor]]  # runs the collectives; gradients by index of the program's outputs


class Accumulation(StepWatcher):
    """Counts the backwards before a gradient is read (``_count``); ``_expected`` is the count at the last read.

    ``stepping``: steps parameters in the running backward, which is then the last; None if the optimizer steps later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = self._expected = 0
        self.stepping: SteppingInBackward | None = None

    def begin_backward(self, parameters: Sequence[Tensor]) -> bool:
        """Count a backward. Returns whether its reductions should wait, since another may come before a read."""
        self.watch(parameters)
        self._count = 1 if any(parameter.grad is None for parameter in parameters) else self._count + 1
        return not self._count == self._expected == 1

    @property
    def is_last(self) -> bool:
        """Whether the running backward is the last before a read, if there are as many as last time."""
        return self._count == self._expected

    def note_read(self) -> None:
        """Note that a gradient whose reduction was deferred is read."""
        self._expected = self._count

    def note_step(self, optimizer: Optimizer) -> None:
        self._count = 0  # the next backward is the first again


class DeferredReduction:
    """The gradients of one or more backwards of one program, before or after their reduction.

    State: ``_sums`` on this rank until they are reduced, then ``_results`` by index of the program's outputs;
    ``_initial``, gradients from before these backwards, to which the results are added; ``_is_taken``, whether a later
    backward has taken the sums to add to them. ``successor``: the deferred reduction of that backward. ``parameters``:
    the owners of the gradients. ``is_own``: whether the sums share no memory.
    """

    def __init__(self, sums: Sums, reduce: Reduce, parameters: Sequence[Tensor],
                 before: DeferredReduction | None = None, is_own: bool = False) -> None:  # fmt: skip
        self._sums, self._reduce, self._is_own = sums, reduce, is_own
        self._initial: Mapping[int, Tensor] = {} if before is None else before._initial
        self._results: Mapping[int, Tensor] = {}
        self._is_taken = False
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.successor: DeferredReduction | None = None
        if before is not None:
            before.successor = self

    @staticmethod
    def of_gradients(parameters: Mapping[int, Tensor], reduce: Reduce) -> DeferredReduction | None:
        """A reduction whose results are added to existing gradients, such as ``zero_grad(set_to_none=False)`` leaves.

        The gradients keep their memory and their objects. None unless all parameters have a gradient, which is reduced
        and cut like its parameter.
        """
        initial: dict[int, Tensor] = {}
        for i, parameter in parameters.items():
            gradient: Any = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor) or gradient.requires_grad:
                return None
            initial[i] = gradient._local_tensor
            if gradient.placements != parameter.placements or type(initial[i]) is not Tensor:
                return None
        deferred = DeferredReduction([], reduce, list(parameters.values()))
        deferred._initial = initial
        for i, parameter in parameters.items():
            gradient = parameter.grad
            gradient._local_tensor = DeferredGradient(deferred, i, initial[i], initial[i].dtype)
        return deferred

    @property
    def adds_to_others(self) -> bool:
        """Whether its results are added to earlier gradients."""
        return bool(self._initial)

    def take(self) -> Totals | None:
        """Hand the sums to a backward that adds to them; None if there are none."""
        sums, self._sums = self._sums, []
        self._is_taken = bool(sums)
        return Totals(sums, self._is_own) if sums else None

    def result(self, index: int) -> Tensor:
        """This rank's shard of a gradient; the first call reduces all of them, and puts them into ``.grad``."""
        if self.successor is not None:
            return self.successor.result(index)
        if self._is_taken:
            what, problem = "which several backwards add to", "one of them has failed"
            raise OrderError("a gradient", what, problem, "call zero_grad, and begin again with the first")
        if not self._results:
            sums, self._sums = self._sums, []
            self.complete(self._reduce(sums) if sums else {})
            self.settle()
        return self._results[index]

    def complete(self, results: Mapping[int, Tensor]) -> None:
        """Take the results of the collectives, and add them to earlier gradients."""
        if self._initial and results:
            torch._foreach_add_([self._initial[i] for i in results], list(results.values()))
        self._results = self._initial or results

    def settle(self) -> None:
        """Replace the deferred shards in ``.grad`` by the results."""
        for reference in self._parameters:
            gradient = None if (parameter := reference()) is None else parameter.grad
            if isinstance(gradient, DTensor) and isinstance(gradient._local_tensor, DeferredGradient):
                if gradient._local_tensor.deferred is self:
                    gradient._local_tensor = self.result(gradient._local_tensor.output)


class DeferredGradient(Tensor):
    """The shard of one gradient before its reduction. Any op but the addition of such shards runs the reduction."""

    deferred: DeferredReduction
    output: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, deferred: DeferredReduction, output: int, like: Tensor, dtype: torch.dtype) -> Any:
        """``output``: the index of the program's output. ``like``: a tensor of the shard's shape and device."""
        gradient: Any = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        gradient.deferred, gradient.output = deferred, output
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.deferred.result(self.output))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on the reduced gradients; autograd's own detach and additions to ``.grad`` need no reduction."""
        if func in (aten.detach.default, aten.alias.default):
            return DeferredGradient(args[0].deferred, args[0].output, args[0], args[0].dtype)
        if func is aten.add_.Tensor and all(isinstance(each, DeferredGradient) for each in args[:2]):
            accumulated, added = args[:2]
            if accumulated.deferred.successor is added.deferred:  # the sums include the earlier gradients
                accumulated.deferred = added.deferred
                return accumulated
        reduced = pytree.tree_map_only(DeferredGradient, lambda each: each.deferred.result(each.output), (args, kwargs))
        return func(*reduced[0], **(reduced[1] or {}))


def deferred_gradient(deferred: DeferredReduction, index: int, parameter: Tensor) -> GlobalTensor:
    """The gradient of a parameter, with the parameter's sharding, in the dtype of its gradients."""
    assert isinstance(parameter, DTensor) and parameter._spec.tensor_meta is not None, type(parameter)
    spec, dtype = parameter._spec, getattr(parameter, "grad_dtype", None) or parameter.dtype
    if dtype != parameter.dtype:
        spec = replace(spec, tensor_meta=parameter._spec.tensor_meta._replace(dtype=dtype))
    return new_global_tensor(DeferredGradient(deferred, index, parameter._local_tensor, dtype), spec)


def deferred_reduction_of(parameters: Sequence[Tensor], reduce: Reduce) -> DeferredReduction | None:
    """The deferred reduction by ``reduce`` that all these parameters' gradients share; None if there is none."""
    pieces = [parameter.grad._local_tensor for parameter in parameters if isinstance(parameter.grad, DTensor)]
    deferred = [piece.deferred for piece in pieces if isinstance(piece, DeferredGradient)]
    is_one = bool(deferred) and len(deferred) == len(parameters) and all(each is deferred[0] for each in deferred)
    is_open = is_one and bool(deferred[0]._sums) and deferred[0]._reduce == reduce  # no gradient was read yet
    return deferred[0] if is_open else None


def reduce_now(parameters: Iterable[Tensor]) -> None:
    """Run the deferred reductions of the parameters' gradients."""
    for gradient in (parameter.grad for parameter in parameters):
        if isinstance(gradient, DTensor) and isinstance(piece := gradient._local_tensor, DeferredGradient):
            piece.deferred.result(piece.output)


def at_end_of_backward(callback: Any) -> None:
    """Call a function once the running backward has put all gradients into ``.grad``."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def computes_gradient(node: Any, of_returned: bool = False) -> bool:
    """Whether the running backward computes the gradient that an autograd node receives, to add it to ``.grad``.

    It does not where ``inputs=`` names others. ``of_returned``: the answer for a leaf's gradient that
    ``torch.autograd.grad`` returns and does not add.
    """
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that autograd.grad names
        return of_returned


def separate_rows(rows: Sequence[Values], tangents: Sequence[Values], own: Container[int] = ()) -> Rows:
    """The gradients of each position in memory of their own; a row that several microbatches share stays one row.

    ``own``: the indices of gradients that are known to share no memory.
    """
    pairs = {tuple(map(id, (*row, *tangent))): (row, tangent) for row, tangent in zip(rows, tangents, strict=True)}
    results = {key: _separate(row, tangent, own) for key, (row, tangent) in pairs.items()}
    return [results[tuple(map(id, (*row, *tangent)))] for row, tangent in zip(rows, tangents, strict=True)]


def _separate(gradients: Values, tangents: Values, own: Container[int] = ()) -> list[Tensor | None]:
    """The gradients, with copies of those that share memory with a tangent or with an earlier gradient."""
    others = [each for i, each in enumerate(gradients) if each is not None and i not in own]
    others += [each for each in tangents if each is not None]
    ranges = sorted((each.data_ptr(), each.nbytes) for each in others if each.numel())
    is_dense = all(each.is_contiguous() for each in others)
    if is_dense and all(start + size <= other for (start, size), (other, _) in pairwise(ranges)):
        return list(gradients)  # the usual case, with a quick check
    used: dict[int, list[tuple[int, int]]] = {}  # by storage, address ranges in order: a bucket holds many gradients
    for tangent in tangents:
        if tangent is not None:
            _reserve(tangent, used)
    return [
        gradient if gradient is None or _reserve(gradient, used) else gradient.clone(memory_format=preserve_format)
        for gradient in gradients
    ]


def _reserve(tensor: Tensor, used: dict[int, list[tuple[int, int]]]) -> bool:
    """Reserve the address range of a tensor; return False if part of it is used already."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = tensor.numel() if tensor.is_contiguous() else sum((size - 1) * stride for size, stride in extents) + 1
    start = tensor.data_ptr()
    end = start + max(0, reach) * tensor.itemsize
    ranges = used.setdefault(tensor.untyped_storage().data_ptr(), [])
    at = bisect_left(ranges, (start, start))
    is_free = (at == 0 or ranges[at - 1][1] <= start) and (at == len(ranges) or end <= ranges[at][0])
    if is_free:
        ranges.insert(at, (start, end))
    return is_free
