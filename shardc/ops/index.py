"""Indexing and embeddings: the indexed dim is whole, dims that all tensors share are free; our ops for a cut one.

Besides the indices, an op of ours takes ``rows``: the numbers of the positions of the indexed dim that are here. An
index of a position elsewhere gives 0 or writes nothing. The result of the whole op is thus the sum over all pieces of a
cut dim, or all pieces joined.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.language.rule import Bind, OpCall, Rule, make_rule, replicated_rule, rule
from shardc.language.sharding import TensorType
from shardc.ops.reduction import spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten


IndexedDims = tuple[int, ...]  # the dims that are indexed, in order


# x[indices], and writes to it.


def _lookup_specs(
    ndim: int, dims: Sequence[int], tensors: Sequence[TensorType | None]
) -> tuple[list[str], list[str], list[str]]:
    """Names of the dims of ``x`` and of ``x[tensors]``, if ``tensors`` index ``dims`` of ``x``, and the tensors' specs.

    ``v0`` names dim 0 of ``x`` if it is indexed, ``i0`` the first dim of the shape to which the tensors broadcast.
    """
    names = [f"v{dim}" if dim in dims else name for dim, name in enumerate(dim_names(ndim))]
    lookup = [f"i{i}" for i in range(max(len(tensor.shape) for tensor in tensors if tensor is not None))]
    others = [name for dim, name in enumerate(names) if dim not in dims]
    start = _lookup_start(dims)
    result = [*others[:start], *lookup, *others[start:]]
    return names, result, [_aligned(lookup, tensor) for tensor in tensors]


def _lookup_start(dims: Sequence[int]) -> int:
    """The first dim of ``x[indices]`` that comes from the indices: 0 if the indexed dims are not adjacent."""
    return dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0


def _aligned(names: Sequence[str], tensor: TensorType | None) -> str:
    """The spec of a tensor that broadcasts to dims of these names: it is aligned on the right."""
    return "_" if tensor is None else " ".join(names[len(names) - len(tensor.shape) :])


def _index_rule(call: OpCall, has_values: bool = False) -> Rule:
    """Values to put are whole along the index: if they were cut, every shard would add to its own copy of ``x``."""
    tensors = call.operands[1:-1] if has_values else call.operands[1:]
    if any(tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        return replicated_rule(call)  # a mask: the size of the result depends on its values
    dims = [dim for dim, tensor in enumerate(tensors) if tensor is not None]
    names, result, specs = _lookup_specs(len(call.operand.shape), dims, tensors)
    left, whole = ", ".join([" ".join(names), *specs]), " ".join(f"v{dim}" for dim in dims)
    if not has_values:
        return make_rule(f"{left} -> {' '.join(result)}", call, linear="0", whole=whole)
    adds = len(call.args) > 3 and call.args[3]
    linear = (frozenset({0, len(call.operands) - 1}),) if adds else ""
    whole = " ".join([whole, *(name for name in result if name.startswith("i"))])
    return make_rule(
        f"{left}, {_aligned(result, call.operands[-1])} -> {' '.join(names)}", call, linear=linear, whole=whole
    )


rule((aten.index.Tensor, aten._unsafe_index.Tensor), _index_rule)
rule((aten.index_put.default, aten._unsafe_index_put.default), lambda call: _index_rule(call, has_values=True))


# One index along one dim.


def _along_index(spec: str, dim_arg: int, *, linear: str = "", whole: str = "", contiguous: str = "") -> Bind:
    """``X`` and ``I`` in the spec are the dims of a tensor and of the index; their indexed dims are ``v`` and ``i``.

    Other dims are free if they have one size in all tensors. ``dim_arg``: the argument that names the dim.
    """
    entries = spec.split(" ->")[0].split(", ")

    def bind(call: OpCall) -> Rule:
        pairs = zip(call.operands, entries, strict=False)
        shapes = [tensor.shape for tensor, entry in pairs if tensor is not None and entry in "XI"]
        columns = zip(dim_names(len(shapes[0])), *shapes, strict=True)
        names = [name if len(set(sizes)) == 1 else "1" for name, *sizes in columns]
        x, index = (spec_with(names, call.args[dim_arg], name) for name in "vi")
        spec_of_call = spec.replace("X", x).replace("I", index)
        return make_rule(spec_of_call, call, linear=linear, whole=whole, contiguous=contiguous)

    return bind


def _searchsorted_rule(call: OpCall) -> Rule:
    is_row = len(call.operand.shape) == 1
    return make_rule("k, ..., k -> ..." if is_row else "... k, ... n, ... k -> ... n", call, whole="k")


def _beside_index_rule(spec: str) -> Bind:
    """``X`` in the spec are the dims of ``x``; the indexed one is whole."""

    def bind(call: OpCall) -> Rule:
        names = dim_names(len(call.operand.shape))
        return make_rule(spec.replace("X", spec_with(names, call.args[1], "1") if names else ""), call)

    return bind


rule(aten.gather.default, _along_index("X, I -> I", 1, linear="0", whole="v"))  # v cut: passes/decompose/index.py
for op in (
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_reduce.two,
):  # fmt: skip
    rule(op, _along_index("X, I, I -> X", 1, whole="v i"))
rule(aten.scatter_add.default, _along_index("X, I, I -> X", 1, linear="02", whole="v i"))
rule(aten.searchsorted.Tensor, _searchsorted_rule)
rule(aten.index_reduce.default, _beside_index_rule("X, 1, X -> X"))
rule((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _beside_index_rule("X, 1,  -> X"))
rule(  # the index counts through all dims of x
    aten.take.default,
    lambda call: make_rule(f"{' '.join(['1'] * len(call.operand.shape))}, ... -> ...", call, linear="0"),
)
rule(aten.bucketize.Tensor, "..., 1 -> ...")


# Our ops over a piece of the indexed dims: ``*args`` are the indices of all these dims, the rows of all, and the dims.


def lookup_at(x: Tensor, *args: Any) -> Tensor:
    """``x[indices]`` where all positions are here, else 0."""
    elsewhere, local, dims = _local_indices(args)
    result = aten.index.Tensor(x, _index_of(local, dims))
    num_after = result.ndim - _lookup_start(dims) - elsewhere.ndim
    return result.masked_fill(elsewhere.reshape([*elsewhere.shape, *[1] * num_after]), 0)


def add_at(values: Tensor, *args: Any) -> Tensor:
    """The sum of ``values``, of the shape of ``x[indices]``, at each position of ``x`` that is here."""
    elsewhere, local, dims = _local_indices(args)
    at = _lookup_start(dims)
    shape = [size for dim, size in enumerate(values.shape) if not at <= dim < at + elsewhere.ndim]
    for dim, rows in zip(dims, args[len(dims) : -1], strict=True):
        shape.insert(dim, rows.shape[0])
    mask = elsewhere.reshape([*elsewhere.shape, *[1] * (values.ndim - at - elsewhere.ndim)])
    return aten.index_put.default(values.new_zeros(shape), _index_of(local, dims), values.masked_fill(mask, 0), True)


def put_at(x: Tensor, values: Tensor, *args: Any) -> Tensor:
    """``x`` with ``values``, of the shape of ``x[indices]``, at the positions that are here."""
    elsewhere, local, dims = _local_indices(args)
    local[0] = local[0].masked_fill(elsewhere, x.shape[dims[0]])
    result = aten.index_put.default(_with_spare(x, dims[0]), _index_of(local, dims), values)
    return result.narrow(dims[0], 0, x.shape[dims[0]])


def gather_at(x: Tensor, index: Tensor, rows: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x.gather(dim, index)`` where the position is here, else 0; ``dtype``: that of the result, ``x``'s if None."""
    elsewhere, local = local_positions(index, rows)
    return x.gather(dim, local).to(dtype or x.dtype).masked_fill(elsewhere, 0)


def scatter_add_at(index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The sum of ``source`` at each position of ``dim`` that is here."""
    shape = [rows.shape[0] if i == dim else size for i, size in enumerate(source.shape)]
    return scatter_added_at_(source.new_zeros(shape), index, source, rows, dim)


def scatter_added_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter_add(dim, index, source)`` at the positions that are here."""
    return scatter_added_at_(x.clone(), index, source, rows, dim)


def scatter_added_at_(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``scatter_added_at`` in place, on ``x``."""
    elsewhere, local = local_positions(index, rows)
    return x.scatter_add_(dim, local, source.masked_fill(elsewhere, 0))


def scatter_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter(dim, index, source)`` at the positions that are here."""
    elsewhere, local = local_positions(index, rows)
    spare = local.masked_fill(elsewhere, x.shape[dim])
    return _with_spare(x, dim).scatter(dim, spare, source).narrow(dim, 0, x.shape[dim])


def local_positions(index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of the indices of positions elsewhere, and the local positions, clamped into range.

    ``rows`` are consecutive: the rules of the ops that call this demand it (``contiguous``).
    """
    position = index - rows[0]
    local = position.clamp(0, rows.shape[0] - 1)
    return local != position, local


def _local_indices(args: Sequence[Any]) -> tuple[Tensor, list[Tensor], IndexedDims]:
    """A mask of places where any index is of a position elsewhere, the local positions of each index, and the dims."""
    *tensors, dims = args
    pairs = map(local_positions, tensors[: len(dims)], tensors[len(dims) :])
    elsewhere, local = zip(*pairs, strict=True)
    return functools.reduce(operator.or_, elsewhere), list(local), dims


def _index_of(local: Sequence[Tensor], dims: IndexedDims) -> list[Tensor | None]:
    """An index for each dim up to the last indexed one, None for the others."""
    by_dim = dict(zip(dims, local, strict=True))
    return [by_dim.get(dim) for dim in range(dims[-1] + 1)]


def _with_spare(x: Tensor, dim: int) -> Tensor:
    """``x`` with one position more, which takes the values for positions elsewhere."""
    return torch.cat([x, x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])], dim)


def _rule_at(spec: str, linear: str = "") -> Bind:
    """``X`` in the spec is ``x``, ``V`` is ``x[indices]``, ``I`` stands for the indices and their rows.

    An op that is not linear may put two values at one position, so values are whole along the index.
    """

    def bind(call: OpCall) -> Rule:
        dims: IndexedDims = call.args[-1]
        first, x = spec.partition("I")[0].count(","), call.operand if spec.startswith("X") else call.result
        names, values, specs = _lookup_specs(len(x.shape), dims, call.operands[first : first + len(dims)])
        sides = {"X": " ".join(names), "V": " ".join(values), "I": ", ".join([*specs, *(names[dim] for dim in dims)])}
        whole = "" if linear else " ".join(name for name in values if name.startswith("i"))
        indexed = " ".join(names[dim] for dim in dims)
        spec_of_call = "".join(sides.get(char, char) for char in spec)
        return make_rule(spec_of_call, call, linear=linear, whole=whole, contiguous=indexed)

    return bind


rule(lookup_at, _rule_at("X, I -> V", linear="0"))
rule(add_at, _rule_at("V, I -> X", linear="0"))
rule(put_at, _rule_at("X, V, I -> X"))
rule(gather_at, _along_index("X, I, v -> I", -1, linear="0", contiguous="v"))
rule(scatter_add_at, _along_index("I, I, v -> X", -1, linear="1", contiguous="v"))
rule((scatter_added_at, scatter_at), _along_index("X, I, I, v -> X", -1, whole="i", contiguous="v"))

# Ops whose results have their own memory.
MAKE_NEW: frozenset[Any] = frozenset({lookup_at, gather_at, add_at, scatter_add_at, scatter_added_at})
WRITE_OVER: dict[Any, Any] = {scatter_added_at: scatter_added_at_}  # the same op in place, on its first operand


def lookup_rows(weight: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """``weight[ids - rows[0]]`` where that row is here, else 0; ``rows``: the numbers of the rows of ``weight``.

    The sum over all pieces of a table cut by rows is the lookup in the whole table.
    """
    elsewhere, local = local_positions(ids, rows)
    return torch.embedding(weight, local).masked_fill_(elsewhere.unsqueeze(-1), 0)


def scatter_rows(gradient: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The gradients of the rows that are here: sums of ``gradient`` over the tokens that looked up each row."""
    elsewhere, local = local_positions(ids, rows)
    flat = gradient.masked_fill(elsewhere.unsqueeze(-1), 0)
    result = flat.new_zeros(rows.shape[0], gradient.shape[-1])
    return result.index_add(0, local.flatten(), flat.flatten(0, -2))


def _tokens(call: OpCall) -> str:
    return " ".join(f"t{i}" for i in range(len(call.operands[1].shape)))  # type: ignore[union-attr]


def _embedding_backward_rule(call: OpCall) -> Rule:
    """Tokens are reduced, unless each row is divided by its number of occurrences among all tokens."""
    tokens = _tokens(call)
    by_count = len(call.args) > 4 and call.args[4]
    return make_rule(f"{tokens} d, {tokens} -> v d", call, linear="0", whole=f"v {tokens if by_count else ''}")


def _bag_maxima(tensor: TensorType | None, without: str) -> str:
    """The spec of the places of maxima, by bag and column; ``without`` if there are none."""
    return "1 d" if tensor is not None and len(tensor.shape) == 2 else without


rule(aten.embedding.default, "v d, ... -> ... d", whole="v", linear="0")
rule(aten.embedding_dense_backward.default, _embedding_backward_rule)
rule(lookup_rows, lambda call: make_rule("v d, ..., v -> ... d", call, linear="0", contiguous="v"))
rule(
    scatter_rows,
    lambda call: make_rule("T d, T, v -> v d".replace("T", _tokens(call)), call, linear="0", contiguous="v"),
)
rule(  # starts and sizes of bags do not depend on the columns
    (aten._embedding_bag.default, aten._embedding_bag_forward_only.default),
    lambda call: make_rule(f"1 d, 1, 1, 1 -> 1 d, _, _, {_bag_maxima(call.results[3], '_')}", call),
)
rule(
    aten._embedding_bag_backward.default,
    lambda call: make_rule(f"1 d, 1, 1, 1, 1, {_bag_maxima(call.operands[5], '1')}, 1 -> 1 d", call, linear="0"),
)
rule(aten._embedding_bag_per_sample_weights_backward.default, "1 d, 1 d, 1, 1, 1 -> 1")
