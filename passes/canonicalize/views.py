"""Views, copies and constants in one form each; those that change nothing are removed."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.program.node import arguments, operand
from shardc.program.program import Program

from ..emitter import Results, Rewrite
from . import pieces

aten = torch.ops.aten


def _copy(program: Program, node: fx.Node) -> Results:
    """Remove a conversion to the dtype that a value already has; make a scalar of a number, as vmap traces it."""
    if not isinstance(node.args[0], fx.Node):
        return program.emit(aten.scalar_tensor.default, node.args[0], like=node, dtype=program.type(node).dtype)
    source = operand(node)
    return source if program.type(node) == program.type(source) else None


def _to_shape(op: Any) -> Rewrite:
    """A rewrite of views as ``op`` with an explicit shape, or as their source if they change nothing."""

    def rewrite(program: Program, node: fx.Node) -> Results:
        source, type_ = operand(node), program.type(node)
        if program.type(source) == type_:
            return source
        return program.insert(op, (source, list(type_.shape)), type_, node)

    return rewrite


_reshape = _to_shape(aten.reshape.default)


def _permute(program: Program, node: fx.Node) -> Results:
    """A transpose, joined with a permute before it, is one permute, or nothing."""
    source, dims = operand(node), _permuted_dims(node, len(program.type(node).shape))
    if source.target is aten.permute.default:
        outer = _permuted_dims(source, len(dims))
        source, dims = operand(source), [outer[dim] for dim in dims]
    if dims == sorted(dims):
        return source
    return program.insert(aten.permute.default, (source, dims), program.type(node), node)


def _permuted_dims(node: fx.Node, ndim: int) -> list[int]:
    given = arguments(node)
    if node.target is aten.permute.default:
        return [dim % ndim for dim in given["dims"]]
    dims = list(range(ndim))
    if ndim > 1:
        i, j = given.get("dim0", 0) % ndim, given.get("dim1", 1) % ndim
        dims[i], dims[j] = dims[j], dims[i]
    return dims


def _index(program: Program, node: fx.Node) -> Results:
    """An index of every dim by an ``arange``, each along a dim of its own, is a view."""
    source, indices = operand(node), arguments(node)["indices"]
    shape, last = program.type(source).shape, -1
    if len(indices) != len(shape):
        return None
    for index, size in zip(indices, shape, strict=True):
        dim = _arange_dim(program, index, size, program.type(node).shape)
        if dim is None or dim <= last:
            return None
        last = dim
    return _reshape(program, node)


def _put_by_mask(program: Program, node: fx.Node) -> Results:
    """One number written where a mask of leading dims is true is an elementwise ``where``."""
    given = arguments(node)
    x, values, (mask, *others) = given["self"], given["values"], given["indices"]
    if mask is None or any(others) or program.type(mask).dtype != torch.bool or program.type(values).numel != 1:
        return None
    shape, rest = program.type(mask).shape, len(program.type(x).shape) - len(program.type(mask).shape)
    if rest:
        mask = program.emit(aten.reshape.default, mask, [*shape, *[1] * rest], like=node)
    if program.type(values).shape:
        values = program.emit(aten.reshape.default, values, [], like=node)
    if given["accumulate"]:
        values = program.emit(aten.add.Tensor, x, values, like=node)
    return program.emit(aten.where.self, mask, values, x, like=node)


def _index_along(program: Program, node: fx.Node) -> Results:
    """An index along one dim is an index by a list of tensors; likewise for values added or copied there."""
    given, ndim = arguments(node), len(program.type(operand(node)).shape)
    if not ndim:
        return None
    dim, index = given["dim"] % ndim, given["index"]
    if program.type(index).shape == ():
        index = program.emit(aten.reshape.default, index, [1], like=node)
    indices = [None] * dim + [index]
    if node.target is aten.index_select.default:
        return program.emit(aten.index.Tensor, given["self"], indices, like=node)
    source, adds = given["source"], node.target is aten.index_add.default
    if adds and given["alpha"] != 1:
        source = program.emit(aten.mul.Scalar, source, given["alpha"], like=node)
    return program.emit(aten.index_put.default, given["self"], indices, source, adds, like=node)


def _arange_dim(program: Program, node: Any, size: int, shape: tuple[int, ...]) -> int | None:
    """The dim of ``shape`` along which an index is ``arange(size)``; None for other indices."""
    if not isinstance(node, fx.Node):
        return None
    index_shape = program.type(node).shape
    if math.prod(index_shape) != size:
        return None
    views = (aten.reshape.default, aten.unsqueeze.default)
    while node.target in views or (node.target is aten.add.Tensor and node.args[1] == 0):
        node = operand(node)
    if node.target is not aten.arange.default or program.type(node).numel != size:
        return None
    lead = len(shape) - len(index_shape)
    dims = [lead + i for i, extent in enumerate(index_shape) if extent > 1]
    return dims[0] if dims else lead + next((i for i, n in enumerate(index_shape) if shape[lead + i] == n), 0)


# Constants: shape-only uses of a value, so that a partial sum is not reduced for the sake of its shape.


def _full_of(value: float) -> Rewrite:
    def rewrite(program: Program, node: fx.Node) -> Results:
        type_ = program.type(node)
        return program.insert(aten.full.default, (list(type_.shape), value), type_, node, {"dtype": type_.dtype})

    return rewrite


def _full(program: Program, node: fx.Node) -> Results:
    given = arguments(node)
    return _full_of(given["fill_value" if "fill_value" in given else "value"])(program, node)


COPIES = (
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default,
)  # fmt: skip

# Undefined values are zero, so that all ranks have the same ones.
ZEROS = (
    aten.zeros_like.default, aten.zeros.default, aten.zero.default, aten.new_zeros.default,
    aten._efficientzerotensor.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default,
    aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
_COPIED = (
    "alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind "
    "unfold unsqueeze view view_as_complex view_as_real"
)


_COPIES_OF_VIEWS = [(getattr(aten, f"{name}_copy"), getattr(aten, name)) for name in _COPIED.split()]
SAME: dict[Any, Any] = {  # a view and a copy of it are the same in a program of values
    **{
        getattr(copy, overload): getattr(view, overload)
        for copy, view in _COPIES_OF_VIEWS
        for overload in view.overloads()
        if overload in copy.overloads()
    },
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _cat(program: Program, node: fx.Node) -> Results:
    """A concatenation without its empty operands: ``torch.cat`` takes a ``[0]`` beside tensors of more dims."""
    tensors, type_ = arguments(node)["tensors"], program.type(node)
    full = [each for each in tensors if program.type(each).numel]
    if not full or len(full) == len(tensors):
        return pieces.cat(program, node)
    promoted = functools.reduce(torch.promote_types, (program.type(each).dtype for each in full))
    result = full[0]
    if len(full) > 1:
        result = program.insert(aten.cat.default, (full, *node.args[1:]), replace(type_, dtype=promoted), node)
    if promoted == type_.dtype:
        return result
    return program.insert(aten._to_copy.default, (result,), type_, node, {"dtype": type_.dtype})


VIEWS: dict[Any, Rewrite] = {
    **dict.fromkeys(COPIES, lambda program, node: operand(node)),
    aten._to_copy.default: _copy,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _reshape),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permute),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    aten.expand.default: _to_shape(aten.expand.default),
    aten.cat.default: _cat,
    aten.slice.Tensor: pieces.slice_of_padded,
    aten.stack.default: pieces.stack,
    aten.index.Tensor: _index,
    aten.index_put.default: _put_by_mask,
    **dict.fromkeys((aten.index_select.default, aten.index_add.default, aten.index_copy.default), _index_along),
}
CONSTANTS: dict[Any, Rewrite] = {
    **dict.fromkeys(ZEROS, _full_of(0)),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), _full_of(1)),
    **dict.fromkeys((aten.full_like.default, aten.new_full.default, aten.fill.Scalar), _full),
}
