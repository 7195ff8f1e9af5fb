"""Ops that are traced as others, which say the same of whole values: the graph holds no strides and no odd kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardc.ops.experts import grouped_mm
from shardc.recurrent import LAYERED, LayeredCall
from shardc.refusal import Unfit

aten = torch.ops.aten


class PlainDropout(TorchFunctionMode):
    """In the block attention with a dropout is ops, of which one draws, not a kernel that draws by itself.

    Likewise recurrent layers, between which torch's trace leaves the dropout out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention and (args[4] if len(args) > 4 else given.get("dropout_p", 0.0)):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **given)
        if func in LAYERED and (call := LayeredCall.of(args)).drops:
            return call.by_layers(func)
        return func(*args, **given)


def _random_from(x: Tensor, low: int, high: int | None = None, *, generator: Any = None) -> Tensor:
    """Whole numbers from ``low`` up to ``high``, by default to the largest that the dtype counts to."""
    largest = int(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max - 1
    return torch.randint_like(x, low, largest + 1 if high is None else high)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """A view by strides as a view by dims, where it takes every element once, else as an index."""
    start = _start(x, storage_offset)
    if _says_the_same(x, size, stride, start):
        return x.view_as(x)
    stored, order = _as_stored(x), _order(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == stored.numel():
        return stored.reshape([size[dim] for dim in order]).permute(_inverse(order))
    return stored[_places(x, size, stride, start)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """``x`` with other elements where a view by strides lies."""
    start = _start(x, storage_offset)
    if _says_the_same(x, size, stride, start):
        return src.view_as(src)
    stored, order = _as_stored(x), _order(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == stored.numel():
        written = src.permute(order).reshape(-1)
    else:
        written = aten.index_put(stored, [_places(x, size, stride, start)], src)
    own = _order(x.stride(), x.shape)
    return written.reshape([x.shape[dim] for dim in own]).permute(_inverse(own))


def _start(x: Tensor, storage_offset: int | None) -> int:
    """Where a view begins, counted from the first element of ``x``."""
    return 0 if storage_offset is None else storage_offset - int(x.storage_offset())


def _says_the_same(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> bool:
    """Whether a view is the tensor itself; how far apart the elements of a dim of size 1 are does not matter."""
    given, own = (
        [(n, s) for n, s in zip(*pair, strict=True) if n != 1] for pair in ((size, stride), (x.shape, x.stride()))
    )
    return not start and tuple(size) == tuple(x.shape) and given == own


def _order(stride: Sequence[int], size: Sequence[int]) -> list[int]:
    """The dims from the major one to the minor one, as they lie."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))


def _is_dense(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the elements lie one after the other."""
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            return False
        expected *= size[dim]
    return True


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _as_stored(x: Tensor) -> Tensor:
    """The elements as they lie, in one dim."""
    order = _order(x.stride(), x.shape)
    if not _is_dense(x.shape, x.stride(), order):
        problem = f"as_strided of a tensor that has gaps: shape {tuple(x.shape)}, strides {x.stride()}"
        raise Unfit(problem, "take it of the whole tensor, or make it contiguous before")
    return x.permute(order).reshape(-1)


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """Where each element of a view lies."""
    places = torch.full([1] * len(size), start, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        places = places + along.reshape([extent if i == dim else 1 for i in range(len(size))])
    return places


def _view_as_complex(x: Tensor) -> Tensor:
    """Its kernel asks how the pairs lie in memory, which no program says."""
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def _gradient_of_none(gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The gradient of a mean over no elements, where torch's own trace divides by their number."""
    return NotImplemented if x.numel() else torch.zeros_like(x)


TRACED_AS: dict[Any, Any] = {
    getattr(aten.random, "from"): _random_from,  # fx cannot print it: "from" is a word of Python's
    aten._grouped_mm.default: grouped_mm,  # its meta function knows bfloat16 alone
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.view_as_complex.default: _view_as_complex,
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
        ),
        _gradient_of_none,
    ),
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default,
}
