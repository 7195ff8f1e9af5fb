"""Pieces of a dim: slice, select, split, cat, stack, pad, and their gradients.

A dim of equal aligned pieces is ``(blk d)``, and a piece is ``d``. ``d`` may be cut, in each block by itself: that is
how one fused weight for q, k and v is cut in three blocks. ``blk`` itself is whole. Other pieces of a dim are a factor
in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.language.rule import Bind, Groups, OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.language.size import slice_bounds
from shardc.ops.reduction import argument, spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten

CHUNKED = "c"  # the dim of a piece: its size differs between tensors, and each cuts it in its own chunks


def _piece_rule(spec: str, call: OpCall, linear: str | Groups) -> Rule:
    return make_rule(spec, call, linear=linear, whole="blk", chunks={CHUNKED: 1})


# One piece: slice and select; stack and unbind, whose pieces lack a dim.


def _bounds(shape: Sequence[int], args: Sequence[Any]) -> tuple[int, int, int, int]:
    """``dim, start, end, step`` from a slice's arguments, brought within the dim."""
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = [*args, *defaults[len(args) :]]
    dim %= len(shape)
    return (dim, *slice_bounds(start, end, step, shape[dim]))


def _slice_rule(op: Any, spec: str, at: int, linear: str = "0") -> None:
    """``L`` and ``S`` in the spec are the large and small side of a slice; ``at``: the position of its dim argument."""

    def bind(call: OpCall) -> Rule:
        shape = _large(spec, call).shape
        dim, start, end, step = _bounds(shape, call.args[at:])
        names, size, length = dim_names(len(shape)), shape[dim], end - start
        large = small = spec_with(names, dim, CHUNKED)
        if (start, length, step) == (0, size, 1):
            large = small = " ".join(names)
        elif step == 1 and length > 0 and size % length == 0 and start % length == 0:
            large, small = spec_with(names, dim, f"(blk d{dim})"), spec_with(names, dim, f"d{dim}")
        return _piece_rule(spec.replace("L", large).replace("S", small), call, linear)

    def local(call: OpCall, shard: OpCall) -> dict[int, Any]:
        """Start and end scale with the dim; the shape in the arguments of a gradient becomes that of one rank."""
        shape, local_shape = _large(spec, call).shape, _large(spec, shard).shape
        dim, start, end, _ = _bounds(shape, call.args[at:])
        size, local_size = shape[dim], local_shape[dim]
        sizes: dict[int, Any] = {} if spec.startswith("L") else {1: list(local_shape)}
        if size in (local_size, end - start):
            return sizes
        return {**sizes, at + 1: start * local_size // size, at + 2: end * local_size // size}

    rule(op, bind, local=local)


def _large(spec: str, call: OpCall) -> TensorType:
    """The tensor ``L`` of a spec: the first operand, or the first result."""
    return call.operand if spec.startswith("L") else call.result


_slice_rule(aten.slice.Tensor, "L -> S", 1)
_slice_rule(aten.slice_backward.default, "S -> L", 2)
_slice_rule(aten.slice_scatter.default, "L, S -> L", 2, linear="01")


def _select_rule(spec: str, at: int, default: int | None = None, linear: str | None = "0") -> Bind:
    """``L`` in the spec is a tensor, ``S`` one without its dim ``v``; ``at``: the position of the dim argument.

    ``S*`` are all operands, or all results. ``linear`` None: a partial sum may pass when it is open on all operands.
    """

    def bind(call: OpCall) -> Rule:
        names, dim = dim_names(len(_large(spec, call).shape)), argument(call, at, default)
        bound = spec.replace("*", ", S" * (max(len(call.operands), len(call.results)) - 1))
        bound = bound.replace("L", spec_with(names, dim, "v")).replace("S", spec_with(names, dim, ""))
        return make_rule(bound, call, linear=_all_operands(call) if linear is None else linear, whole="v")

    return bind


def _all_operands(call: OpCall) -> Groups:
    return (frozenset(range(len(call.operands))),)


rule(aten.select.int, _select_rule("L -> S", 1))  # v cut: passes/decompose/index.py
rule(aten.select_backward.default, _select_rule("S -> L", 2), sizes=1)
rule(aten.select_scatter.default, _select_rule("L, S -> L", 2, linear="01"))
rule(aten.stack.default, _select_rule("S* -> L", 1, default=0, linear=None))
rule(aten.unbind.int, _select_rule("L -> S*", 1, default=0))


# All pieces: split and cat.


def _piece_specs(large: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[str, str]:
    """The specs of the whole tensor and of a piece; pieces are blocks if they have equal sizes."""
    names = dim_names(len(large))
    if len(set(sizes)) == 1 and sizes[0]:
        return spec_with(names, dim, "(blk d)"), spec_with(names, dim, "d")
    return spec_with(names, dim, CHUNKED), spec_with(names, dim, CHUNKED)


def _split_rule(call: OpCall) -> Rule:
    dim = argument(call, 2, 0)
    large, small = _piece_specs(call.operand.shape, dim, [result.shape[dim] for result in call.results if result])
    return _piece_rule(f"{large} -> {', '.join([small] * len(call.results))}", call, "0")


def _local_split(call: OpCall, shard: OpCall) -> dict[int, Any]:
    sizes = [result.shape[argument(call, 2, 0)] for result in shard.results if result]
    return {1: sizes[0] if isinstance(call.args[1], int) else sizes}


def _cat_rule(call: OpCall) -> Rule:
    dim, tensors = argument(call, 1, 0), [operand for operand in call.operands if operand]
    large, small = _piece_specs(call.result.shape, dim, [tensor.shape[dim] for tensor in tensors])
    return _piece_rule(f"{', '.join([small] * len(tensors))} -> {large}", call, _all_operands(call))


rule((aten.split.Tensor, aten.split_with_sizes.default), _split_rule, local=_local_split)
rule(aten.cat.default, _cat_rule)


# Ops that move elements along some dims. These are whole, or in chunks that exchange the elements at their edges.


def _whole_along(call: OpCall, dims: Sequence[int]) -> Rule:
    ndim = len(call.operand.shape)
    whole = {dim % ndim for dim in dims} if ndim else set()
    spec = " ".join("1" if dim in whole else name for dim, name in enumerate(dim_names(ndim)))
    return make_rule(f"{spec} -> {spec}", call, linear="0")


def _chunked_along(call: OpCall, dims: Sequence[int], linear: str = "0") -> Rule:
    names = dim_names(len(call.operand.shape))
    spec, chunks = " ".join(names), {names[dim]: 1 for dim in dims} if names else {}
    return make_rule(f"{spec} -> {spec}", call, linear=linear, chunks=chunks)


def _pad_rule(call: OpCall) -> Rule:
    padded = [-1 - i // 2 for i, count in enumerate(call.args[1]) if count]
    return _chunked_along(call, padded, linear="0" if argument(call, 2, 0) == 0 else "")


rule(aten.flip.default, lambda call: _chunked_along(call, call.args[1]))
rule(aten.roll.default, lambda call: _chunked_along(call, argument(call, 2, ()) or range(len(call.operand.shape))))
rule(aten.rot90.default, lambda call: _whole_along(call, argument(call, 2, (0, 1))))
rule(aten.constant_pad_nd.default, _pad_rule)


# Padding of a dim that is cut unevenly: collectives need pieces of equal size.


def fit(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with ``dim`` of another size: truncated, or padded with zeros."""
    missing = size - x.shape[dim]
    if missing < 0:
        return x.narrow(dim, 0, size).contiguous()
    return pad(x, [0] * (2 * (x.ndim - dim - 1)) + [0, missing]) if missing else x


def fill_padding(x: Tensor, dim: int, inner: int, chunk: int, length: int, fill: float) -> Tensor:
    """``x`` with its padding replaced by ``fill``.

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
    """The number that does not change a sum, a maximum or a minimum."""
    if reduce == "sum":
        return 0
    if dtype == torch.bool:
        return int(reduce == "min")
    if dtype.is_floating_point:
        return -math.inf if reduce == "max" else math.inf
    return torch.iinfo(dtype).min if reduce == "max" else torch.iinfo(dtype).max
