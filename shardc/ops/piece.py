"""Pieces of a dim: slice, select, split, cat, stack, pad, and their gradients.

Where a dim falls into equal aligned pieces it is ``(blk d)`` and a piece is ``d``: ``d`` may be cut, each block apart,
which is how one fused weight for q, k and v comes to be cut in three blocks. ``blk`` itself is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.ops.reduction import spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten


CHUNKS = "c"  # the dim of a piece, of another size on each tensor: what it is cut in are chunks of each
ANY = {CHUNKS: 1}


def _jointly(count: int) -> tuple[frozenset[int], ...]:
    return (frozenset(range(count)),)


# One piece.


def _bounds(shape: Sequence[int], args: Sequence[Any]) -> tuple[int, int, int, int]:
    """``dim, start, end, step`` of a slice's arguments, as numbers within the dim."""
    defaults: list[Any] = [0, None, None, 1]
    dim, *bounds = [*args, *defaults[len(args) :]]
    dim %= len(shape)
    return (dim, *slice(*bounds).indices(shape[dim]))


def _slice_specs(large: Sequence[int], args: Sequence[Any]) -> tuple[str, str]:
    """The specs of the large and of the small side of a slice."""
    dim, start, end, step = _bounds(large, args)
    names = dim_names(len(large))
    size, length = large[dim], end - start
    if (start, length, step) == (0, size, 1):
        return " ".join(names), " ".join(names)
    is_block = step == 1 and length > 0 and size % length == 0 and start % length == 0
    return spec_with(names, dim, f"(blk d{dim})" if is_block else CHUNKS), spec_with(
        names, dim, f"d{dim}" if is_block else CHUNKS
    )


def _slice_rule(call: OpCall) -> Rule:
    large, small = _slice_specs(call.operand.shape, call.args[1:])
    return make_rule(f"{large} -> {small}", call, linear="0", whole="blk", chunks=ANY)


def _slice_backward_rule(call: OpCall) -> Rule:
    large, small = _slice_specs(call.result.shape, call.args[2:])
    return make_rule(f"{small} -> {large}", call, linear="0", whole="blk", chunks=ANY)


def _slice_scatter_rule(call: OpCall) -> Rule:
    large, small = _slice_specs(call.operand.shape, call.args[2:])
    return make_rule(f"{large}, {small} -> {large}", call, linear="01", whole="blk", chunks=ANY)


def _local_bounds(large: TensorType, local: TensorType, args: Sequence[Any], at: int) -> dict[int, Any]:
    """Start and end on a rank, for arguments whose ``dim`` is at position ``at``: they scale with the dim."""
    dim, start, end, _ = _bounds(large.shape, args[at:])
    whole, part = large.shape[dim], local.shape[dim]
    return {} if whole in (part, end - start) else {at + 1: start * part // whole, at + 2: end * part // whole}


def _local_slice_backward(call: OpCall, shard: OpCall) -> dict[int, Any]:
    bounds = _local_bounds(call.result, shard.result, call.args, 2)
    return {1: list(shard.result.shape), **bounds}


def _select_names(ndim: int, dim: int) -> tuple[str, str]:
    names = dim_names(ndim)
    return spec_with(names, dim, "1"), spec_with(names, dim, "")


def _select_rule(call: OpCall) -> Rule:
    large, small = _select_names(len(call.operand.shape), call.args[1])
    return make_rule(f"{large} -> {small}", call, linear="0")


def _select_backward_rule(call: OpCall) -> Rule:
    large, small = _select_names(len(call.result.shape), call.args[2])
    return make_rule(f"{small} -> {large}", call, linear="0")


def _select_scatter_rule(call: OpCall) -> Rule:
    large, small = _select_names(len(call.operand.shape), call.args[2])
    return make_rule(f"{large}, {small} -> {large}", call, linear="01")


# All pieces.


def _piece_specs(whole: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[str, str]:
    """The specs of a dim and of its pieces; pieces of different sizes, or of none, leave it whole."""
    names = dim_names(len(whole))
    if len(set(sizes)) == 1 and sizes[0]:
        return spec_with(names, dim, "(blk d)"), spec_with(names, dim, "d")
    return spec_with(names, dim, CHUNKS), spec_with(names, dim, CHUNKS)


def _split_rule(call: OpCall) -> Rule:
    dim = call.args[2] if len(call.args) > 2 else 0
    large, small = _piece_specs(call.operand.shape, dim, [result.shape[dim] for result in call.results if result])
    return make_rule(f"{large} -> {', '.join([small] * len(call.results))}", call, linear="0", whole="blk", chunks=ANY)


def _local_split(call: OpCall, shard: OpCall) -> dict[int, Any]:
    dim = call.args[2] if len(call.args) > 2 else 0
    sizes = [result.shape[dim] for result in shard.results if result]
    return {1: sizes[0] if isinstance(call.args[1], int) else sizes}


def _cat_rule(call: OpCall) -> Rule:
    tensors = [operand for operand in call.operands if operand]
    dim = call.args[1] if len(call.args) > 1 else 0
    large, small = _piece_specs(call.result.shape, dim, [tensor.shape[dim] for tensor in tensors])
    return make_rule(
        f"{', '.join([small] * len(tensors))} -> {large}",
        call,
        linear=_jointly(len(tensors)),
        whole="blk",
        chunks=ANY,
    )


def _stack_rule(call: OpCall) -> Rule:
    count = len(call.operands)
    large, small = _select_names(len(call.result.shape), call.args[1] if len(call.args) > 1 else 0)
    return make_rule(f"{', '.join([small] * count)} -> {large}", call, linear=_jointly(count))


def _unbind_rule(call: OpCall) -> Rule:
    large, small = _select_names(len(call.operand.shape), call.args[1] if len(call.args) > 1 else 0)
    return make_rule(f"{large} -> {', '.join([small] * len(call.results))}", call, linear="0")


# Ops that move elements along some dims: whole, or in chunks that need what moves over their edges.


def _along_rule(call: OpCall, dims: Sequence[int], linear: str = "0") -> Rule:
    ndim = len(call.operand.shape)
    whole = {dim % ndim for dim in dims} if ndim else set()
    spec = " ".join("1" if dim in whole else name for dim, name in enumerate(dim_names(ndim)))
    return make_rule(f"{spec} -> {spec}", call, linear=linear)


def _moving_rule(call: OpCall, dims: Sequence[int], linear: str = "0") -> Rule:
    names = dim_names(len(call.operand.shape))
    chunks = {names[dim]: 1 for dim in dims} if names else {}
    spec = " ".join(names)
    return make_rule(f"{spec} -> {spec}", call, linear=linear, chunks=chunks)


def _roll_rule(call: OpCall) -> Rule:
    dims = call.args[2] if len(call.args) > 2 and call.args[2] else range(len(call.operand.shape))
    return _moving_rule(call, dims)


def _pad_rule(call: OpCall) -> Rule:
    pads = call.args[1]
    padded = [-1 - i // 2 for i, pad in enumerate(pads) if pad]
    value = call.args[2] if len(call.args) > 2 else 0
    return _moving_rule(call, padded, linear="0" if value == 0 else "")


rule(aten.slice.Tensor, _slice_rule, local=lambda call, shard: _local_bounds(call.operand, shard.operand, call.args, 1))
rule(aten.slice_backward.default, _slice_backward_rule, local=_local_slice_backward)
rule(
    aten.slice_scatter.default,
    _slice_scatter_rule,
    local=lambda call, shard: _local_bounds(call.operand, shard.operand, call.args, 2),
)
rule(aten.select.int, _select_rule)
rule(aten.select_backward.default, _select_backward_rule, sizes=1)
rule(aten.select_scatter.default, _select_scatter_rule)
rule(aten.split.Tensor, _split_rule, local=_local_split)
rule(aten.split_with_sizes.default, _split_rule, local=_local_split)
rule(aten.cat.default, _cat_rule)
rule(aten.stack.default, _stack_rule)
rule(aten.unbind.int, _unbind_rule)
rule(aten.flip.default, lambda call: _moving_rule(call, call.args[1]))
rule(aten.roll.default, _roll_rule)
rule(aten.rot90.default, lambda call: _along_rule(call, call.args[2] if len(call.args) > 2 else (0, 1)))
rule(aten.triu.default, lambda call: _along_rule(call, (-2, -1)))
rule(aten.tril.default, lambda call: _along_rule(call, (-2, -1)))
rule(aten.constant_pad_nd.default, _pad_rule)


# Pieces of equal size, which collectives need of a dim that is cut unevenly.


def fit(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with ``dim`` of another size, cut short or longer by zeros, as a collective of equal pieces needs it."""
    here = x.shape[dim]
    if size < here:
        return x.narrow(dim, 0, size).contiguous()
    after = [0] * (2 * (x.ndim - dim - 1)) + [0, size - here]
    return pad(x, after) if size > here else x


def fill_padding(x: Tensor, dim: int, inner: int, chunk: int, length: int, fill: float) -> Tensor:
    """``x`` with ``fill`` for its padding.

    ``dim`` is rows of ``chunk * inner`` elements, of which the first ``length * inner`` are data.
    """
    if length == chunk:
        return x
    rows = x.unflatten(dim, (-1, chunk * inner))
    data = rows.narrow(dim + 1, 0, length * inner)
    padding = list(data.shape)
    padding[dim + 1] = (chunk - length) * inner
    return torch.cat([data, data.new_full(padding, fill)], dim + 1).view(x.shape)


def neutral(reduce: str, dtype: torch.dtype) -> float:
    """What does not change a sum, a maximum or a minimum."""
    if reduce == "sum":
        return 0
    if dtype == torch.bool:
        return int(reduce == "min")
    if dtype.is_floating_point:
        return -math.inf if reduce == "max" else math.inf
    return torch.iinfo(dtype).min if reduce == "max" else torch.iinfo(dtype).max
