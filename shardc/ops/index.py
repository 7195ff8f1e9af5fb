"""Indexing: the dim that is indexed is whole, every other dim free; see position.py for where it is cut."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardc.language.rule import Call, Rule, make_rule, replicated_rule, rule
from shardc.language.sharding import TensorType
from shardc.ops.reduction import spec_with
from shardc.ops.view import dim_names

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


Dims = tuple[int, ...]  # the dims that are indexed, in order


def lookup_at(x: Tensor, *given: Any) -> Tensor:
    """``x[indices]`` where all positions are here, else 0; ``given``: an index and the rows of each dim, the dims."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    found = aten.index.Tensor(x, _at(local, dims))
    kept = x.ndim - dims[-1] - 1 if _is_run(dims) else x.ndim - len(dims)
    return found.masked_fill(elsewhere.reshape([*elsewhere.shape, *[1] * kept]), 0)


def add_at(values: Tensor, *given: Any) -> Tensor:
    """The sum of ``values``, of the shape of ``x[indices]``, at each position of ``x`` that is here."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    at, kept = _values_dims(values.ndim, dims, elsewhere.ndim)
    shape = [values.shape[dim] for dim in kept]
    for dim, row in zip(dims, rows, strict=True):
        shape.insert(dim, row.shape[0])
    mask = elsewhere.reshape([*elsewhere.shape, *[1] * (values.ndim - at - elsewhere.ndim)])
    return aten.index_put.default(values.new_zeros(shape), _at(local, dims), values.masked_fill(mask, 0), True)


def put_at(x: Tensor, values: Tensor, *given: Any) -> Tensor:
    """``x`` with ``values``, of the shape of ``x[indices]``, at the positions that are here."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    local[0] = local[0].masked_fill(elsewhere, x.shape[dims[0]])
    put = aten.index_put.default(_longer(x, dims[0]), _at(local, dims), values)
    return put.narrow(dims[0], 0, x.shape[dims[0]])


def gather_at(x: Tensor, index: Tensor, rows: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x.gather(dim, index)`` where the position is here, else 0; ``dtype``: that of the result, ``x``'s if None."""
    elsewhere, (local,) = _local([index], [rows])
    return x.gather(dim, local).to(dtype or x.dtype).masked_fill(elsewhere, 0)


def scatter_add_at(index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The sum of ``source`` at each position of ``dim`` that is here."""
    shape = [rows.shape[0] if i == dim else size for i, size in enumerate(source.shape)]
    return scatter_added_at_(source.new_zeros(shape), index, source, rows, dim)


def scatter_added_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter_add(dim, index, source)`` at the positions that are here."""
    return scatter_added_at_(x.clone(), index, source, rows, dim)


def scatter_added_at_(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The same, written over ``x``."""
    elsewhere, (local,) = _local([index], [rows])
    return x.scatter_add_(dim, local, source.masked_fill(elsewhere, 0))


def scatter_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter(dim, index, source)`` at the positions that are here."""
    elsewhere, (local,) = _local([index], [rows])
    kept = local.masked_fill(elsewhere, x.shape[dim])
    return _longer(x, dim).scatter(dim, kept, source).narrow(dim, 0, x.shape[dim])


def _taken_apart(given: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], Dims]:
    *tensors, dims = given
    return tensors[: len(dims)], tensors[len(dims) :], dims


def _local(indices: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Where any position is elsewhere, and each position as counted here."""
    elsewhere, local = zip(*map(local_rows, indices, rows), strict=True)
    return functools.reduce(operator.or_, elsewhere), list(local)


def _at(local: Sequence[Tensor], dims: Dims) -> list[Tensor | None]:
    """An index over all dims up to the last that is indexed."""
    found = dict(zip(dims, local, strict=True))
    return [found.get(dim) for dim in range(dims[-1] + 1)]


def _longer(x: Tensor, dim: int) -> Tensor:
    """``x`` with one position more, for what belongs elsewhere."""
    return torch.cat([x, x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])], dim)


def _is_run(dims: Dims) -> bool:
    return dims == tuple(range(dims[0], dims[-1] + 1))


def _values_dims(ndim: int, dims: Dims, lookup: int) -> tuple[int, list[int]]:
    """In ``x[indices]`` of ``ndim`` dims: where those of the indices begin, and which are others."""
    at = dims[0] if _is_run(dims) else 0  # indices apart from each other put their dims in front
    return at, [dim for dim in range(ndim) if not at <= dim < at + lookup]


# Their rules.


def _names(call: Call, first: int, ndim: int) -> tuple[str, str, str]:
    """The specs of ``x``, of ``x[indices]``, and of the indices, which follow ``first`` operands, and their rows."""
    dims: Dims = call.args[-1]
    indices = call.operands[first : first + len(dims)]
    names, lookup, found = lookup_names(ndim, dims, num_lookup_dims(indices))
    given = [*index_specs(indices, lookup), *(names[dim] for dim in dims)]
    return " ".join(names), " ".join(found), ", ".join(given)


def _lookup_at_rule(call: Call) -> Rule:
    x, values, given = _names(call, 1, len(call.operand.shape))
    return make_rule(f"{x}, {given} -> {values}", call, linear="0")


def _add_at_rule(call: Call) -> Rule:
    x, values, given = _names(call, 1, len(call.result.shape))
    return make_rule(f"{values}, {given} -> {x}", call, linear="0")


def _put_at_rule(call: Call) -> Rule:
    """What is put is whole along the index, as two values may go to one position."""
    x, values, given = _names(call, 2, len(call.operand.shape))
    whole = " ".join(name for name in values.split() if name.startswith("i"))
    return make_rule(f"{x}, {values}, {given} -> {x}", call, whole=whole)


def _gather_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{x}, {index}, v -> {index}", call, linear="0")


def _scatter_add_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{index}, {index}, v -> {x}", call, linear="1")


def _scatter_added_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{x}, {index}, {index}, v -> {x}", call, whole="i")


def _scatter_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:3])
    return make_rule(f"{x}, {index}, {index}, v -> {x}", call, whole="i")


MAKE_NEW: frozenset[Any] = frozenset(  # what they return is in memory of its own
    {lookup_at, gather_at, add_at, scatter_add_at, scatter_added_at}
)
WRITE_OVER: dict[Any, Any] = {scatter_added_at: scatter_added_at_}  # the same over the first operand

rule(lookup_at, _lookup_at_rule)
rule(add_at, _add_at_rule)
rule(put_at, _put_at_rule)
rule(gather_at, _gather_at_rule)
rule(scatter_add_at, _scatter_add_at_rule)
rule(scatter_added_at, _scatter_added_at_rule)
rule(scatter_at, _scatter_at_rule)


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


def lookup_rows(weight: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """``weight[ids - rows[0]]`` where that row is here, else 0; ``rows``: the numbers of the rows that ``weight`` has.

    Over all pieces of a table cut by rows the sum is the lookup in the whole table.
    """
    elsewhere, local = local_rows(ids, rows)
    return torch.embedding(weight, local).masked_fill_(elsewhere.unsqueeze(-1), 0)


def scatter_rows(gradient: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the rows that are here: each the sum of ``gradient`` over the tokens that looked it up."""
    elsewhere, local = local_rows(ids, rows)
    flat = gradient.masked_fill(elsewhere.unsqueeze(-1), 0)
    result = flat.new_zeros(rows.shape[0], gradient.shape[-1])
    return result.index_add(0, local.flatten(), flat.flatten(0, -2))


def local_rows(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids are elsewhere, and each as counted here: the nearest that is, where it is elsewhere."""
    given = ids - rows[0]
    local = given.clamp(0, rows.shape[0] - 1)
    return local != given, local


def _tokens(call: Call) -> str:
    return " ".join(f"t{i}" for i in range(len(call.operands[1].shape)))  # type: ignore[union-attr]


def _embedding_backward_rule(call: Call) -> Rule:
    """Tokens are reduced, unless each row is divided by how often it occurs in all of them."""
    tokens = _tokens(call)
    by_count = len(call.args) > 4 and call.args[4]
    return make_rule(f"{tokens} d, {tokens} -> v d", call, linear="0", whole=f"v {tokens if by_count else ''}")


def _scatter_rows_rule(call: Call) -> Rule:
    return make_rule(f"{_tokens(call)} d, {_tokens(call)}, v -> v d", call, linear="0")


def _bags(tensor: TensorType | None) -> str:
    """Per bag or per bag and column: the places of the maxima."""
    return "1 d" if tensor is not None and len(tensor.shape) == 2 else "1"


def _embedding_bag_rule(call: Call) -> Rule:
    """Where bags begin and how large they are does not depend on the columns."""
    places = _bags(call.results[3])
    return make_rule(f"1 d, 1, 1, 1 -> 1 d, _, _, {places if 'd' in places else '_'}", call)


def _embedding_bag_backward_rule(call: Call) -> Rule:
    return make_rule(f"1 d, 1, 1, 1, 1, {_bags(call.operands[5])}, 1 -> 1 d", call, linear="0")


rule(aten._embedding_bag.default, _embedding_bag_rule)
rule(aten._embedding_bag_forward_only.default, _embedding_bag_rule)
rule(aten._embedding_bag_backward.default, _embedding_bag_backward_rule)
rule(aten._embedding_bag_per_sample_weights_backward.default, "1 d, 1 d, 1, 1, 1 -> 1")
rule(aten.embedding.default, "v d, ... -> ... d", whole="v", linear="0")
rule(aten.embedding_dense_backward.default, _embedding_backward_rule)
rule(lookup_rows, "v d, ..., v -> ... d", linear="0")
rule(scatter_rows, _scatter_rows_rule)
