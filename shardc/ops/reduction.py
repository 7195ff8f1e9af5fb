"""Reductions over dims, and scans and sorts along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.language.rule import Bind, OpCall, Rule, make_rule, rule
from shardc.language.sharding import ReduceOp, TensorType
from shardc.ops.view import dim_names

aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)  # dtypes that are summed in float32, and rounded once


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are summed."""
    return torch.float32 if dtype in NARROW else dtype


def argument(call: OpCall, at: int, default: Any) -> Any:
    """``args[at]`` of a call, or the default if it is left out."""
    return call.args[at] if len(call.args) > at else default


def _reduction(reduce: ReduceOp | None, at: int = 1, linear: str = "", default: int | None = None) -> Bind:
    """A rule whose reduced dims leave partial results, or are whole if ``reduce`` is None.

    ``args[at]`` names the dims: one, several, or all if it is None or empty.
    """

    def bind(call: OpCall) -> Rule:
        ndim, named = len(call.operand.shape), argument(call, at, default)
        dims = set(range(ndim)) if named in (None, []) or not ndim else {dim % ndim for dim in _several(named)}
        keepdim, names = len(call.result.shape) == ndim, dim_names(ndim)
        result = " ".join("1" if dim in dims else name for dim, name in enumerate(names) if keepdim or dim not in dims)
        whole = "" if reduce else " ".join(names[dim] for dim in dims)
        spec = f"{' '.join(names)} -> {', '.join([result] * len(call.results))}"
        return make_rule(spec, call, linear=linear, whole=whole, reduce=reduce or "sum")

    return bind


def along(dims: Callable[[OpCall], int | Sequence[int]], linear: str = "", in_chunks: bool = False) -> Bind:
    """A rule for ops that keep all dims, of which ``dims`` are whole. They are factors, so that passes see their cuts.

    ``in_chunks``: they may be cut, since decompose splits the op into chunks.
    """

    def bind(call: OpCall) -> Rule:
        shape, names = call.operand.shape, dim_names(len(call.operand.shape))
        whole = {dim % len(shape) for dim in _several(dims(call))} if shape else set()

        def spec(tensor: TensorType | None) -> str:
            sizes = shape if tensor is None else tensor.shape
            return " ".join("1" if i in whole and sizes[i] != shape[i] else name for i, name in enumerate(names))

        sides = " -> ".join(", ".join(map(spec, tensors)) for tensors in (call.operands, call.results))
        factors = [names[dim] for dim in whole]
        if in_chunks:
            return make_rule(sides, call, linear=linear, chunks=dict.fromkeys(factors, 1))
        return make_rule(sides, call, linear=linear, whole=" ".join(factors))

    return bind


def _several(dims: int | Sequence[int]) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else dims


def spec_with(names: Sequence[str], dim: int, name: str) -> str:
    """The spec of a tensor whose dims have these names, with another name for one dim."""
    return " ".join(name if i == dim % len(names) else other for i, other in enumerate(names))


def _dim(at: int, default: int = -1) -> Callable[[OpCall], int]:
    return lambda call: argument(call, at, default)


def _segment_rule(data: int) -> Bind:
    """Segments of a dim are whole, and so are the dims before it, whose segments differ."""

    def bind(call: OpCall) -> Rule:
        axis = call.kwargs.get("axis", 0)
        names = ["1" if i <= axis else name for i, name in enumerate(dim_names(len(call.operand.shape)))]
        x, segments = " ".join(names), " ".join(["1"] * (axis + 1))
        return make_rule(f"{', '.join([x] * data + [segments] * 3)} -> {x}", call)

    return bind


rule(aten.segment_reduce.default, _segment_rule(data=1))
rule(aten._segment_reduce_backward.default, _segment_rule(data=3))
rule((aten.sum.default, aten.sum.dim_IntList), _reduction("sum", linear="0"))
rule((aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _reduction("sum"))
rule((aten.amax.default, aten.max.default), _reduction("max"))
rule((aten.amin.default, aten.min.default), _reduction("min"))

# The mean of means is not the mean where pieces differ; canonicalize makes it a sum and a division.
rule((aten.mean.default, aten.mean.dim), _reduction(None, linear="0"))
for op in (
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim, aten.logsumexp.default,
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.any.default, aten.any.dim,
    aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default, aten.prod.dim_int,
):  # fmt: skip
    rule(op, _reduction(None))
rule(aten.linalg_vector_norm.default, _reduction(None, at=2))
rule(aten.kthvalue.default, _reduction(None, at=2, default=-1))
rule(aten.mode.default, _reduction(None, default=-1))
rule(aten.hash_tensor.default, _reduction(None))


def _histogram_rule(call: OpCall) -> Rule:
    """The count of each bin is a sum over elements, unless the bins depend on the range of the elements."""
    low, high = [*call.args[2:4], 0, 0][:2]
    names = " ".join(dim_names(len(call.operand.shape)))
    return make_rule(f"{names} -> 1", call, whole=names if low == high else "", sees_padding=True)


rule(aten.histc.default, _histogram_rule)


def sum_from_end(self: Tensor, dim: int) -> Tensor:
    """Sums of each element of a dim and those after it: the backward of ``cumsum``."""
    return self.flip(dim).cumsum(dim).flip(dim)


def logsumexp_from_end(self: Tensor, dim: int) -> Tensor:
    """Logsumexps of each element of a dim and those after it, for the backward of ``logcumsumexp``."""
    return self.flip(dim).logcumsumexp(dim).flip(dim)


rule((aten.cumsum.default, sum_from_end), along(_dim(1), linear="0", in_chunks=True))
rule((aten.logcumsumexp.default, logsumexp_from_end), along(_dim(1), in_chunks=True))
for op in (
    aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.sort.default,
    aten.glu.default, aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default,
):  # fmt: skip
    rule(op, along(_dim(1)))
for op in (aten.glu_backward.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    rule(op, along(_dim(2), linear="0"))
rule(aten.sort.stable, along(lambda call: call.kwargs.get("dim", -1)))
rule(aten.topk.default, along(_dim(2)))
