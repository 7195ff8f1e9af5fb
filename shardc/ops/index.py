"""Indexing: the dim that is indexed is whole, every other dim free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardc.ops.reduction import with_name
from shardc.ops.view import dim_names
from shardc.rule import Call, Rule, make_rule, replicated_rule, rule
from shardc.sharding import TensorType

aten = torch.ops.aten


def _lookup_names(call: Call, tensors: Sequence[TensorType | None]) -> tuple[list[str], list[str], list[str]]:
    """Names of the dims of ``x``, of what the index tensors broadcast to, and of ``x[tensors]``."""
    ndim = len(call.operand.shape)
    indexed = [i for i, tensor in enumerate(tensors) if tensor is not None]
    names = ["1" if i in indexed else name for i, name in enumerate(dim_names(ndim))]
    lookup = [f"i{i}" for i in range(max(len(tensor.shape) for tensor in tensors if tensor is not None))]
    kept = [name for i, name in enumerate(names) if i not in indexed]
    is_run = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if is_run else 0  # indices apart from each other put their dims in front
    return names, lookup, [*kept[:at], *lookup, *kept[at:]]


def _tensor_specs(tensors: Sequence[TensorType | None], lookup: Sequence[str]) -> list[str]:
    """The spec of each index tensor, aligned on the right of what they broadcast to."""
    return ["_" if tensor is None else _right(lookup, tensor) for tensor in tensors]


def _right(names: Sequence[str], tensor: TensorType) -> str:
    return " ".join(names[len(names) - len(tensor.shape) :])


def _has_mask(tensors: Sequence[TensorType | None]) -> bool:
    """Whether an index is a mask, whose result's size depends on its values."""
    return any(tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _index_rule(call: Call) -> Rule:
    tensors = call.operands[1:]
    if _has_mask(tensors):
        return replicated_rule(call)
    names, lookup, result = _lookup_names(call, tensors)
    specs = [" ".join(names), *_tensor_specs(tensors, lookup)]
    return make_rule(f"{', '.join(specs)} -> {' '.join(result)}", call, linear="0")


def _index_put_rule(call: Call) -> Rule:
    """What is put is whole along the index: cut, every shard would add to its own copy of ``x``."""
    *tensors, values = call.operands[1:]
    if _has_mask(tensors):
        return replicated_rule(call)
    assert values is not None
    names, lookup, result = _lookup_names(call, tensors)
    put = ["1" if name in lookup else name for name in result]
    specs = [" ".join(names), *_tensor_specs(tensors, ["1"] * len(lookup)), _right(put, values)]
    adds = len(call.args) > 3 and call.args[3]
    linear = (frozenset({0, len(call.operands) - 1}),) if adds else ""
    return make_rule(f"{', '.join(specs)} -> {' '.join(names)}", call, linear=linear)


def _along_names(call: Call, index: str, x: str = "1") -> tuple[str, str]:
    """Names for ``x`` and for the index of a gather or scatter; only dims of one size in all tensors are free."""
    shapes = [operand.shape for operand in call.operands if operand is not None]
    dim = call.args[1] % max(1, len(shapes[0]))
    names = [
        name if len(set(sizes)) == 1 else "1" for name, *sizes in zip(dim_names(len(shapes[0])), *shapes, strict=True)
    ]
    return _with(names, dim, x), _with(names, dim, index)


def _with(names: Sequence[str], dim: int, name: str) -> str:
    return " ".join(with_name(names, dim, name))


def _gather_rule(call: Call) -> Rule:
    x, index = _along_names(call, index="i", x="v")
    return make_rule(f"{x}, {index} -> {index}", call, linear="0", whole="v")


def _scatter_rule(linear: str = "") -> Callable[[Call], Rule]:
    def bind(call: Call) -> Rule:
        x, index = _along_names(call, index="1")
        return make_rule(f"{x}, {index}, {index} -> {x}", call, linear=linear)

    return bind


def _index_select_rule(call: Call) -> Rule:
    names, dim = dim_names(len(call.operand.shape)), call.args[1] % len(call.operand.shape)
    return make_rule(f"{_with(names, dim, '1')}, i -> {_with(names, dim, 'i')}", call, linear="0")


def _index_add_rule(call: Call) -> Rule:
    names, dim = dim_names(len(call.operand.shape)), call.args[1] % len(call.operand.shape)
    x = _with(names, dim, "1")
    return make_rule(f"{x}, 1, {x} -> {x}", call, linear="02")


def _searchsorted_rule(call: Call) -> Rule:
    is_row = len(call.operand.shape) == 1
    return make_rule("k, ..., k -> ..." if is_row else "... k, ... n, ... k -> ... n", call, whole="k")


rule(aten.index.Tensor, _index_rule)
rule(aten._unsafe_index.Tensor, _index_rule)
rule(aten.index_put.default, _index_put_rule)
rule(aten._unsafe_index_put.default, _index_put_rule)
rule(aten.gather.default, _gather_rule)
rule(aten.scatter.src, _scatter_rule())
rule(aten.scatter.value, _scatter_rule())
rule(aten.scatter_add.default, _scatter_rule(linear="02"))
rule(aten.scatter_reduce.two, _scatter_rule())
rule(aten.index_select.default, _index_select_rule)
rule(aten.index_add.default, _index_add_rule)
rule(aten.searchsorted.Tensor, _searchsorted_rule)
