"""Indexing: the dim that is indexed is whole, every other dim free; see position.py for where it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardc.ops.reduction import spec_with
from shardc.ops.view import dim_names
from shardc.rule import Call, Rule, make_rule, replicated_rule, rule
from shardc.sharding import TensorType

aten = torch.ops.aten


def lookup_names(ndim: int, dims: Sequence[int], count: int) -> tuple[list[str], list[str], list[str]]:
    """Names of the dims of ``x``, of the ``count`` dims that index tensors broadcast to, and of ``x[tensors]``.

    ``dims`` of ``x`` are indexed: ``v0`` is that of dim 0.
    """
    names = [f"v{dim}" if dim in dims else name for dim, name in enumerate(dim_names(ndim))]
    lookup = [f"i{i}" for i in range(count)]
    kept = [name for dim, name in enumerate(names) if dim not in dims]
    is_run = list(dims) == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if is_run else 0  # indices apart from each other put their dims in front
    return names, lookup, [*kept[:at], *lookup, *kept[at:]]


def index_specs(tensors: Sequence[TensorType | None], lookup: Sequence[str]) -> list[str]:
    """The spec of each index tensor, aligned on the right of what they broadcast to."""
    return ["_" if tensor is None else _right(lookup, tensor) for tensor in tensors]


def num_lookup_dims(tensors: Sequence[TensorType | None]) -> int:
    """Of how many dims index tensors are together."""
    return max(len(tensor.shape) for tensor in tensors if tensor is not None)


def _right(names: Sequence[str], tensor: TensorType) -> str:
    return " ".join(names[len(names) - len(tensor.shape) :])


def _indexed(tensors: Sequence[TensorType | None]) -> list[int]:
    return [dim for dim, tensor in enumerate(tensors) if tensor is not None]


def _has_mask(tensors: Sequence[TensorType | None]) -> bool:
    """Whether an index is a mask, whose result's size depends on its values."""
    return any(tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _index_rule(call: Call) -> Rule:
    tensors = call.operands[1:]
    if _has_mask(tensors):
        return replicated_rule(call)
    dims = _indexed(tensors)
    names, lookup, result = lookup_names(len(call.operand.shape), dims, num_lookup_dims(tensors))
    specs = [" ".join(names), *index_specs(tensors, lookup)]
    return make_rule(f"{', '.join(specs)} -> {' '.join(result)}", call, linear="0", whole=_whole(dims))


def _whole(dims: Sequence[int]) -> str:
    return " ".join(f"v{dim}" for dim in dims)


def _index_put_rule(call: Call) -> Rule:
    """What is put is whole along the index: cut, every shard would add to its own copy of ``x``."""
    *tensors, values = call.operands[1:]
    if _has_mask(tensors):
        return replicated_rule(call)
    assert values is not None
    dims = _indexed(tensors)
    names, lookup, result = lookup_names(len(call.operand.shape), dims, num_lookup_dims(tensors))
    specs = [" ".join(names), *index_specs(tensors, lookup), _right(result, values)]
    adds = len(call.args) > 3 and call.args[3]
    linear = (frozenset({0, len(call.operands) - 1}),) if adds else ""
    whole = f"{_whole(dims)} {' '.join(lookup)}"
    return make_rule(f"{', '.join(specs)} -> {' '.join(names)}", call, linear=linear, whole=whole)


def along_names(dim: int, tensors: Sequence[TensorType | None]) -> tuple[str, str]:
    """Names for ``x`` and for the index of a gather or scatter; other dims are free if of one size in all tensors."""
    shapes = [tensor.shape for tensor in tensors if tensor is not None]
    names = [
        name if len(set(sizes)) == 1 else "1" for name, *sizes in zip(dim_names(len(shapes[0])), *shapes, strict=True)
    ]
    return spec_with(names, dim, "v"), spec_with(names, dim, "i")


def _gather_rule(call: Call) -> Rule:
    x, index = along_names(call.args[1], call.operands)
    return make_rule(f"{x}, {index} -> {index}", call, linear="0", whole="v")


def _scatter_rule(linear: str = "") -> Callable[[Call], Rule]:
    def bind(call: Call) -> Rule:
        x, index = along_names(call.args[1], call.operands)
        return make_rule(f"{x}, {index}, {index} -> {x}", call, linear=linear, whole="v i")

    return bind


def _searchsorted_rule(call: Call) -> Rule:
    is_row = len(call.operand.shape) == 1
    return make_rule("k, ..., k -> ..." if is_row else "... k, ... n, ... k -> ... n", call, whole="k")


def _beside_index_rule(spec: str) -> Callable[[Call], Rule]:
    """``X`` in the spec are the dims of ``x``, of which the one that is indexed is whole."""

    def bind(call: Call) -> Rule:
        names = dim_names(len(call.operand.shape))
        return make_rule(spec.replace("X", spec_with(names, call.args[1], "1") if names else ""), call)

    return bind


def _take_rule(call: Call) -> Rule:
    """The index counts through all dims of ``x``."""
    return make_rule(f"{' '.join(['1'] * len(call.operand.shape))}, ... -> ...", call, linear="0")


rule(aten.index.Tensor, _index_rule)
rule(aten._unsafe_index.Tensor, _index_rule)
rule(aten.index_put.default, _index_put_rule)
rule(aten._unsafe_index_put.default, _index_put_rule)
rule(aten.gather.default, _gather_rule)
rule(aten.scatter.src, _scatter_rule())
rule(aten.scatter.value, _scatter_rule())
rule(aten.scatter_add.default, _scatter_rule(linear="02"))
rule(aten.scatter.reduce, _scatter_rule())
rule(aten.scatter.value_reduce, _scatter_rule())
rule(aten.scatter_reduce.two, _scatter_rule())
rule(aten.searchsorted.Tensor, _searchsorted_rule)
rule(aten.index_reduce.default, _beside_index_rule("X, 1, X -> X"))
rule(aten.index_fill.int_Scalar, _beside_index_rule("X, 1,  -> X"))
rule(aten.index_fill.int_Tensor, _beside_index_rule("X, 1,  -> X"))
rule(aten.take.default, _take_rule)
rule(aten.bucketize.Tensor, "..., 1 -> ...")
