"""Products of rows with the matrices of their experts: rows, experts and the dims of the matrices may all be cut.

Who sorts rows by expert wants them whole; here each row names its expert, so that a rank takes any rows and any
experts. Over all pieces of the experts the products are an open sum, since a row whose expert is elsewhere gives 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardc.rule import rule


@torch.library.custom_op("shardc::expert_product", mutates_args=())
def expert_product(x: Tensor, weight: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """``x[i] @ weight[j]`` for each row ``i``, where ``experts[j]`` is ``expert[i]``; 0 where there is no such ``j``.

    ``x``: [rows, k]. ``weight``: [experts here, k, n]. ``expert``: the number of each row's expert. ``experts``: the
    numbers of the experts here, of ``num_experts`` everywhere.
    """
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for j, rows in _rows_of(expert, experts):
        result[rows] += x[rows] @ weight[j]  # padding among the experts names one of them again, and adds zeros
    return result


@torch.library.custom_op("shardc::expert_sum", mutates_args=())
def expert_sum(x: Tensor, y: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """For each expert here the sum of ``outer(x[i], y[i])`` over its rows: the gradient of ``expert_product``'s weight.

    ``x``: [rows, k]. ``y``: [rows, n]. The result is [experts here, k, n].
    """
    result = x.new_zeros(experts.shape[0], x.shape[1], y.shape[1])
    for j, rows in _rows_of(expert, experts):
        result[j] = x[rows].T @ y[rows]
    return result


def _rows_of(expert: Tensor, experts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each expert here that has rows, by its place, with their numbers."""
    order = expert.argsort(stable=True)
    bounds = torch.stack([torch.searchsorted(expert[order], experts, right=right) for right in (False, True)]).tolist()
    for j, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start < end:
            yield j, order[start:end]


@expert_product.register_fake
def _product_type(x: Tensor, weight: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@expert_sum.register_fake
def _sum_type(x: Tensor, y: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    return x.new_empty(experts.shape[0], x.shape[1], y.shape[1])


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``aten._grouped_mm`` by rows that name their group; ``offs``: where each group of the ragged dim ends.

    Which dim is ragged: of [m, k] and [groups, k, n] the rows, of [groups, m, k] and [k, n] the columns, and of two
    matrices the dim that is contracted. What stands beyond the last group is 0.
    """
    assert bias is None and (offs is not None or a.ndim == b.ndim == 3), (a.shape, b.shape)
    if offs is None:
        result = a @ b
    elif a.ndim == 2 and b.ndim == 3:
        result = expert_product(a, b, *_groups(offs, a.shape[0]))
    elif a.ndim == 3:
        result = expert_product(b.T, a.transpose(1, 2), *_groups(offs, b.shape[1])).T
    else:
        result = expert_sum(a.T, b, *_groups(offs, b.shape[0]))
    return result if out_dtype is None else result.to(out_dtype)


def _groups(offs: Tensor, num_rows: int) -> tuple[Tensor, Tensor, int]:
    """The group of each row, and the numbers and the number of the groups."""
    rows = torch.arange(num_rows, dtype=offs.dtype, device=offs.device)
    return torch.searchsorted(offs, rows, right=True), torch.arange(offs.shape[0], device=offs.device), offs.shape[0]


def _flops(x: Any, y: Any, expert: Any, experts: Any, num_experts: int, **result: Any) -> int:
    """A multiply and an add for every number of a row's product, for the share of the rows whose expert is here."""
    return 2 * x[0] * x[1] * y[-1] * experts[0] // num_experts


register_flop_formula([torch.ops.shardc.expert_product, torch.ops.shardc.expert_sum])(_flops)
rule(torch.ops.shardc.expert_product.default, "s k, e k n, s, e -> s n", linear="0 1")
rule(torch.ops.shardc.expert_sum.default, "s k, s n, s, e -> e k n", linear="0 1")
