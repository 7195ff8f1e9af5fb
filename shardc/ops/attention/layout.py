"""Memory layouts that kernels of torch need.

Programs do not state layouts, so the executor makes these copies. In other layouts the kernels refuse their operands or
silently compute wrong values. Fused attention needs neighbours in the last dim to be neighbours in memory. In dtypes of
two bytes, the backward of CUDA's memory-efficient attention reads the result of forward as ``[batch, position, head,
size]`` regardless of its strides (torch 2.11 to 2.13). cuDNN's backward takes that result to have the strides of the
first call with queries, keys and values of the same strides (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
ROW = 16  # each row of a mask begins in memory at a multiple of this number of elements

Layout = Callable[[int, Sequence[Any]], Tensor]  # (position, all arguments) to the argument there, in its layout


def dense(x: Tensor) -> Tensor:
    """A tensor whose neighbours in the last dim are neighbours in memory."""
    return x if x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()


def positions_first(x: Tensor) -> Tensor:
    """``[batch, head, position, size]`` as ``[batch, position, head, size]`` in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_long_rows(mask: Tensor) -> Tensor:
    """A mask whose rows begin at multiples of ``ROW`` elements; broadcast rows (stride 0) do so."""
    places = (mask.storage_offset(), *mask.stride()[:-1])
    is_ready = mask.stride(-1) == 1 and all(place % ROW == 0 for place in places)
    return mask if is_ready else pad(mask, [0, -mask.shape[-1] % ROW])[..., : mask.shape[-1]]


def in_order_of(x: Tensor, other: Tensor) -> Tensor:
    """A tensor whose dims have the same order in memory as those of another."""
    order = sorted(range(other.ndim), key=other.stride().__getitem__, reverse=True)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def _contiguous(at: int, args: Sequence[Any]) -> Tensor:
    x: Tensor = args[at]
    return x.contiguous()


def _of_attention(at: int, args: Sequence[Any]) -> Tensor:
    return dense(args[at])


def _of_efficient(at: int, args: Sequence[Any]) -> Tensor:
    return with_long_rows(args[at]) if at == 3 else dense(args[at])


def _of_efficient_backward(at: int, args: Sequence[Any]) -> Tensor:
    x = args[at]
    return with_long_rows(x) if at == 4 else positions_first(x) if at == 5 else dense(x)


def _of_cudnn_backward(at: int, args: Sequence[Any]) -> Tensor:
    """The result of forward is expected in the layout that forward gave it, which is that of the queries."""
    return in_order_of(args[at], args[1]) if at == 4 else dense(args[at])


LAYOUTS: Mapping[Any, Layout] = {
    aten.native_group_norm.default: _contiguous,
    aten.native_group_norm_backward.default: _contiguous,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _of_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _of_attention,
    aten._scaled_dot_product_flash_attention.default: _of_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _of_attention,
    aten._scaled_dot_product_cudnn_attention.default: _of_attention,
    aten._scaled_dot_product_cudnn_attention_backward.default: _of_cudnn_backward,
    EFFICIENT: _of_efficient,
    EFFICIENT_BACKWARD: _of_efficient_backward,
}  # fmt: skip
