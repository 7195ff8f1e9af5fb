"""canonicalize: captured -> canonical. Fewer kinds of op, each with an honest rule.

Losses and means become sums and divisions (rewrite_losses.py), random ops become counter-based draws (draw_random.py),
shape-only uses of a value become constants, and copies and views that change nothing go::

    mean: f32[] = mean(x)                      sum: f32[] = sum(x);  div: f32[] = div(sum, 512)
    m: f32[8, 64] = bernoulli(x, 0.9)     ->   u = uniform(random, 8153, index);  lt = lt(u, 0.9);  m = _to_copy(lt)
    n: f32[8, 64] = clone(x)                   (x)

Invariant: every op is pure and every random op is ``uniform``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardc.language.partition import P
from shardc.program.node import arguments, is_annotation, operand, takes_device
from shardc.program.program import Pin, Program

from ..emitter import Emitter, Results, Rewrite
from .draws import draw_random
from .losses import LOSSES
from .unsort import unsort

aten = torch.ops.aten


def _index_rows(program: Program, node: fx.Node) -> Results:
    """Rows in their own order are the tensor, and each row ``n`` times is an expanded view of it."""
    given = arguments(node)
    source, repeats = given["self"], _repeats(program, given)
    if repeats is None:
        return None
    shape = program.type(source).shape
    each = program.emit(aten.unsqueeze.default, source, 1, like=node)
    several = program.emit(aten.expand.default, each, [shape[0], repeats, *shape[1:]], like=node)
    return program.emit(aten.reshape.default, several, [shape[0] * repeats, *shape[1:]], like=node)


def _index_put(program: Program, node: fx.Node) -> Results:
    """What is put on each row, or the sum of the ``n`` that are added to it."""
    given = arguments(node)
    target, values, repeats = given["self"], given["values"], _repeats(program, given)
    shape = program.type(target).shape
    if repeats is None or not (given["accumulate"] or repeats == 1):
        return None
    if program.type(values).shape != (shape[0] * repeats, *shape[1:]):
        return None
    if repeats > 1:
        several = program.emit(aten.reshape.default, values, [shape[0], repeats, *shape[1:]], like=node)
        values = program.emit(aten.sum.dim_IntList, several, [1], like=node)
    if not given["accumulate"] or _is_zero(target):
        return values
    return program.emit(aten.add.Tensor, target, values, like=node)


def put_by_mask(program: Program, node: fx.Node) -> Results:
    """One number put where a mask of leading dims says is a choice between the two, element by element."""
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


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1:] == (0,)


def _repeats(program: Program, given: dict[str, Any]) -> int | None:
    """How often each row of the first dim is named, one after the other; None where other places are."""
    indices, size = given["indices"], program.type(given["self"]).shape[0]
    if len(indices) != 1 or not size:
        return None
    index, repeats = indices[0], program.type(indices[0]).numel // size
    if index.target is aten.floor_divide.default and index.args[1] == repeats:
        index = operand(index)
    elif repeats != 1:
        return None
    is_count = index.target is aten.arange.default and program.type(index).shape == (size * repeats,)
    return repeats if is_count else None


KNOWN_PLACES: dict[Any, Rewrite] = {aten.index.Tensor: _index_rows, aten.index_put.default: _index_put}


def canonicalize(program: Program) -> Program:
    """The program in fewer kinds of op, with equal values."""
    program = program.copy(level="canonical")
    draw_random(program)
    _rewrite(program, VIEWS | CONSTANTS | LOSSES | CONVOLUTIONS)
    if unsort(program):
        _rewrite(program, KNOWN_PLACES)
    program.remove_dead()
    _part_placed_outputs(program)
    return program


def _rewrite(program: Program, rewrites: Mapping[Any, Rewrite]) -> None:
    for node in list(program.calls):
        _drop_device(node)
        node.target = SAME.get(node.target, node.target)
        if node.target in rewrites:
            with program.graph.inserting_before(node):
                new = rewrites[node.target](program, node)
            if new is not None and new is not node:
                program.replace(node, new)


def _part_placed_outputs(program: Program) -> None:
    """An output that the user placed and that is an input, an annotated value or another such output: a copy of it."""
    placed = {pin.name: pin for pin in program.pins if pin.kind == "output"}
    taken = {*program.placeholders, *filter(is_annotation, program.calls)}
    results = list(program.results)
    for i, output in enumerate(program.outputs):
        node, pin = results[i], placed.get(output.name) if output.kind == "output" else None
        if node is None or pin is None:
            continue
        if node in taken:
            results[i] = node = _annotated(program, node, pin)
        taken.add(node)
    program.output_node.args = (tuple(results),)


def _annotated(program: Program, node: fx.Node, pin: Pin) -> fx.Node:
    type_ = program.type(node)
    said = str(P.of(pin.sharding, type_.shape, pin.open))
    with program.graph.inserting_before(program.output_node):
        return program.insert(
            torch.ops.shardc.annotate.default, (node, said, pin.priority), type_, node, {"said": pin.text}
        )


def _drop_device(node: fx.Node) -> None:
    """A constant is made where the runtime computes: the device it was captured on says nothing."""
    if takes_device(node.target):
        dropped = ("device", "pin_memory", "layout")
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in dropped}


# Copies and views.


def _identity(program: Program, node: fx.Node) -> Results:
    return operand(node)


def _copy(program: Program, node: fx.Node) -> Results:
    """A conversion to the dtype that the value has already."""
    source = operand(node)
    return source if program.type(node) == program.type(source) else None


def _to_shape(op: Any) -> Rewrite:
    """Every view of a kind is one op to an explicit shape, or nothing."""

    def rewrite(program: Program, node: fx.Node) -> Results:
        source, type_ = operand(node), program.type(node)
        if program.type(source) == type_:
            return source
        return program.insert(op, (source, list(type_.shape)), type_, node)

    return rewrite


_reshape = _to_shape(aten.reshape.default)


def _permute(program: Program, node: fx.Node) -> Results:
    """Every transpose is a permute from the first of a chain of them, or nothing."""
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
    """An index by ``arange`` of each dim, each spread along its own dims, is a view."""
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


def _index_along(program: Program, node: fx.Node) -> Results:
    """An index of one dim is an index of a tensor by tensors; likewise what is added or put there."""
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
    """The dim of ``shape`` along which an index runs from 0 to ``size``, if that is all it does."""
    if not isinstance(node, fx.Node):
        return None
    index_shape = program.type(node).shape
    if math.prod(index_shape) != size:
        return None
    while node.target in (aten.reshape.default, aten.unsqueeze.default) or _adds_zero(node):
        node = operand(node)
    if node.target is not aten.arange.default or program.type(node).numel != size:
        return None
    lead = len(shape) - len(index_shape)
    dims = [lead + i for i, extent in enumerate(index_shape) if extent > 1]
    return dims[0] if dims else lead + next((i for i, n in enumerate(index_shape) if shape[lead + i] == n), 0)


def _adds_zero(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and isinstance(node.args[1], int) and node.args[1] == 0


# Constants: shape-only uses of a value, so that a partial sum is not reduced for the sake of its shape.


def _full_of(value: float) -> Rewrite:
    def rewrite(program: Program, node: fx.Node) -> Results:
        type_ = program.type(node)
        return program.insert(aten.full.default, (list(type_.shape), value), type_, node, {"dtype": type_.dtype})

    return rewrite


def _full(program: Program, node: fx.Node) -> Results:
    return _full_of(arguments(node)["fill_value"])(program, node)


COPIES = (
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
)

# What is undefined is zero, so that all ranks have the same.
ZEROS = (
    aten.zeros_like.default,
    aten.zeros.default,
    aten.zero.default,
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_COPIED = (
    "alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind "
    "unfold unsqueeze view view_as_complex view_as_real"
)


def _copies_of_views() -> dict[Any, Any]:
    """For each op that copies what a view shows, the view: in a program of values they are the same."""
    pairs = [(getattr(aten, f"{name}_copy"), getattr(aten, name)) for name in _COPIED.split()]
    return {
        getattr(copy, overload): getattr(view, overload)
        for copy, view in pairs
        for overload in view.overloads()
        if overload in copy.overloads()
    }


SAME: dict[Any, Any] = {
    **_copies_of_views(),
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
VIEWS: dict[Any, Rewrite] = {
    **dict.fromkeys(COPIES, _identity),
    aten._to_copy.default: _copy,
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default), _to_shape(aten.reshape.default)
    ),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permute),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    aten.expand.default: _to_shape(aten.expand.default),
    aten.index.Tensor: _index,
    aten.index_put.default: put_by_mask,
    **dict.fromkeys((aten.index_select.default, aten.index_add.default, aten.index_copy.default), _index_along),
}
CONSTANTS: dict[Any, Rewrite] = {
    **dict.fromkeys(ZEROS, _full_of(0)),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), _full_of(1)),
    **dict.fromkeys((aten.full_like.default, aten.new_full.default), _full),
    aten.fill.Scalar: lambda program, node: _full_of(arguments(node)["value"])(program, node),
}


def _convolution(program: Program, node: fx.Node) -> Results:
    emit = Emitter(program, node)
    given = emit.given
    bias = given["bias"]
    if bias is None:
        return None
    result = emit(node.target, *(given | {"bias": None}).values())
    channels = [emit.shape(bias)[0], *[1] * (len(emit.shape(result)) - 2)]
    return emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, channels))


def _convolution_backward(program: Program, node: fx.Node) -> Results:
    """The bias's gradient is a sum of its own."""
    emit = Emitter(program, node)
    given = emit.given
    of_x, of_weight, of_bias = given["output_mask"]
    if not of_bias:
        return None
    dims = [dim for dim in range(len(emit.shape(given["grad_output"]))) if dim != 1]
    summed = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    if not (of_x or of_weight):
        return None, None, summed
    without = given | {"bias_sizes": None, "output_mask": [of_x, of_weight, False]}
    found = emit.results(emit(node.target, *without.values()))
    return found[0], found[1], summed


CONVOLUTIONS: dict[Any, Rewrite] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
