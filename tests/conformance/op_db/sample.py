"""Samples of ``op_db`` as modules of their tensors, with sizes that four ranks divide or with torch's uneven sizes."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardc.runtime.comm.dtensor import same_bits

EVEN = {"XS": 2, "S": 4, "M": 12, "L": 24}
UNEVEN = {"XS": 3, "S": 5, "M": 10, "L": 20}  # torch's own sizes
_LOOKED_AT = 60  # samples of a variant that are drawn, to choose from
_MAX_NUMEL = 40_000  # the most elements in all tensors of a sample
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


class NotDense(Exception):
    """A sample has a tensor that is not a plain strided one."""


@dataclass(frozen=True)
class Sample:
    """A call of an op: its ``tensors``, and ``call(*tensors)``, which returns the tensors of the result."""

    tensors: tuple[Tensor, ...]
    call: Callable[..., list[Tensor]]

    @property
    def module(self) -> nn.Module:
        """The call as a module whose arguments are ``xs.0``, ``xs.1``..."""
        return _Call(self.call)

    def in_double(self) -> Sample:
        """The same call in float64."""
        return Sample(tuple(map(_doubled, self.tensors)), self.call)


class _Call(nn.Module):
    def __init__(self, call: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.call(*xs))


@cache
def variants() -> dict[str, Any]:
    """Every variant that takes float32, by name. The database takes seconds to import.

    Two of its functions are replaced. One seeds torch before a random op; shardc refuses a model that does so, and
    draws numbers itself. The other searches the whole stack for a running test, for each sample; there is none.
    """
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal import common_utils

    common_utils.extract_test_fn = lambda: None
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    ops = [op for op in database.op_db if op.supports_dtype(torch.float32, "cpu")]
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in ops}


def samples(name: str, op: Any, sizes: dict[str, int], count: int) -> list[Sample]:
    """Samples of a variant: first one with the most dims above 1, then random ones of the better half.

    Returns at most ``2 * count`` samples, the same at every call.
    """
    try:
        found = [_sample(op, drawn) for drawn in _drawn(op, sizes)]
    except (RuntimeError, IndexError):  # a few of torch's sample functions mix these sizes with fixed ones
        found = [_sample(op, drawn) for drawn in _drawn(op, UNEVEN)]
    small = [sample for sample in found if sum(tensor.numel() for tensor in sample.tensors) <= _MAX_NUMEL]
    ranked = sorted(small, key=lambda sample: -_variety(sample))
    good = [sample for sample in ranked if _variety(sample)] or ranked
    best = good[: max(2 * count, len(good) // 2)]
    return best[:1] + random.Random(name).sample(best[1:], min(2 * count - 1, len(best) - 1)) if best else []


def odd_samples(op: Any, count: int) -> list[Sample]:
    """Up to ``count`` samples of each odd kind: empty operands, dims of 1, no dims, and each of ``OTHER_DTYPES``."""
    plain = [_sample(op, drawn) for drawn in _drawn(op, UNEVEN)]
    chosen: list[Sample] = []
    for is_odd in ODD:
        chosen += [sample for sample in plain if any(map(is_odd, sample.tensors))][:count]
    for dtype in OTHER_DTYPES:
        if op.supports_dtype(dtype, "cpu"):
            chosen += [_sample(op, drawn) for drawn in _drawn(op, UNEVEN, dtype)[:count]]
    each = {id(sample): sample for sample in chosen}.values()
    return [sample for sample in each if sum(tensor.numel() for tensor in sample.tensors) <= _MAX_NUMEL]


OTHER_DTYPES = (torch.int64, torch.bool, torch.bfloat16)
ODD: tuple[Callable[[Tensor], bool], ...] = (
    lambda tensor: tensor.numel() == 0,
    lambda tensor: 1 in tensor.shape,
    lambda tensor: tensor.ndim == 0,
)


def _drawn(op: Any, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> list[Any]:
    set_sizes(sizes)
    torch.manual_seed(0)
    random.seed(0)
    is_trained = op.supports_autograd and dtype.is_floating_point
    return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=is_trained), _LOOKED_AT))


def set_sizes(sizes: dict[str, int]) -> None:
    """Make torch's sample functions use these sizes."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "S"):
            for key in sizes.keys() & vars(module).keys():
                setattr(module, key, sizes[key])


def _variety(sample: Sample) -> int:
    """The number of dims above 1, counting at most three of each tensor."""
    return sum(min(3, sum(size > 1 for size in tensor.shape)) for tensor in sample.tensors)


def _sample(op: Any, drawn: Any) -> Sample:
    """A sample of drawn arguments. An op that works in place changes copies, which are results too."""
    leaves, tree = pytree.tree_flatten((drawn.input, list(drawn.args), dict(drawn.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    _all_dense([leaves[i] for i in places])
    tensors = tuple(_plain(leaves[i]) for i in places)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        given, args, kwargs = pytree.tree_unflatten(filled, tree)
        result = op.op(given, *args, **kwargs)
        tensors_of(result)
        return tensors_of(drawn.output_process_fn_grad(result))

    changed = _changed(run, tensors)

    def call(*tensors: Tensor) -> list[Tensor]:
        given = [tensor.clone() for tensor in tensors]
        results = run(given)
        return results + [given[i] for i in changed if all(given[i] is not result for result in results)]

    return Sample(tensors, call)


def _changed(run: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> list[int]:
    """The indices of tensors that a call changes in place; empty if it does not run."""
    copies = [tensor.detach().clone() for tensor in tensors]
    with contextlib.suppress(Exception), torch.no_grad():
        run(copies)
    return [i for i, (old, new) in enumerate(zip(tensors, copies, strict=True)) if not same_bits(old, new)]


def tensors_of(found: Any) -> list[Tensor]:
    """The tensors of a result, without numbers and other values."""
    tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
    _all_dense(tensors)
    return tensors


def _all_dense(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            raise NotDense(f"{tensor.layout} tensors".removeprefix("torch."))


def _plain(tensor: Tensor) -> Tensor:
    copied = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return copied.requires_grad_(tensor.requires_grad)


def _doubled(tensor: Tensor) -> Tensor:
    wide = {torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}
    return tensor.detach().to(wide.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)


def halves(tensor: Tensor, dim: int) -> Sequence[Tensor]:
    """The two halves of a tensor along a dim."""
    half = tensor.shape[dim] // 2
    return tensor.split([half, tensor.shape[dim] - half], dim)
