"""keep_dims: canonical -> canonical. Every matrix product becomes one ``dot`` over the model's own dims.

So a batch dim and a sequence dim never merge into one flat dim, where only one of their cuts could stay. The views and
permutes that flattened the operands of a product are removed::

    v: f32[128, 64] = reshape(x)        # x: f32[8, 16, 64]
    m: f32[128, 256] = mm(v, w)         ->   m: f32[8, 16, 256] = dot(x, w, "a b c, c d -> a b d")
    y: f32[8, 16, 256] = reshape(m)

Invariant: no mm, bmm, addmm or baddbmm is left, and every value is as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.program.node import arguments, operand
from shardc.program.program import Program

aten = torch.ops.aten

Names = tuple[str, ...]
SPECS: dict[Any, tuple[Names, Names, Names]] = {
    aten.mm.default: (("m", "k"), ("k", "n"), ("m", "n")),
    aten.addmm.default: (("m", "k"), ("k", "n"), ("m", "n")),
    aten.bmm.default: (("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n")),
    aten.baddbmm.default: (("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n")),
}


def keep_dims(program: Program) -> Program:
    """The program with every matrix product as a ``dot`` over the model's own dims."""
    program = program.edited()
    for node in list(program.calls):
        with program.graph.inserting_before(node):
            if node.target in SPECS:
                _rewrite(program, node)
            elif node.target is aten.sum.dim_IntList:
                _sum_unmerged(program, node)
    _join_reshapes(program)
    program.remove_dead()
    for node in program.calls:
        program.rule(node)  # bound once for all later compiles of this program with other annotations
    return program


@dataclass(slots=True)
class _Product:
    """A product in the making: two operands, the names of their dims and those of the result's dims."""

    operands: list[fx.Node]
    names: list[Names]
    out: Names


def _rewrite(program: Program, node: fx.Node) -> None:
    has_bias = node.target in (aten.addmm.default, aten.baddbmm.default)
    left, right, out = SPECS[node.target]
    product = _Product([operand(node, has_bias), operand(node, has_bias + 1)], [left, right], out)
    while _absorb(program, product, node):
        pass
    sizes = {
        name: size
        for factor, names in zip(product.operands, product.names, strict=True)
        for name, size in zip(names, program.type(factor).shape, strict=True)
    }
    type_ = TensorType(tuple(sizes[name] for name in product.out), program.type(node).dtype)
    result = program.insert(dot, (*product.operands, _spec(product)), type_, node)
    if has_bias:
        result = _add_bias(program, node, result)
    program.replace(node, _reshape(program, result, program.type(node).shape))


def _add_bias(program: Program, node: fx.Node, product: fx.Node) -> fx.Node:
    """``beta * bias + alpha * product``; the product is flattened unless its last dims are those of the bias."""
    bias, beta, alpha = operand(node), arguments(node)["beta"], arguments(node)["alpha"]
    shape, bias_shape = program.type(product).shape, program.type(bias).shape
    if shape[len(shape) - len(bias_shape) :] != bias_shape:
        product = _reshape(program, product, program.type(node).shape)
    if alpha != 1:
        product = program.emit(aten.mul.Scalar, product, alpha, like=node)
    if beta != 1:
        bias = program.emit(aten.mul.Scalar, bias, beta, like=node)
    return program.emit(aten.add.Tensor, product, bias, like=node)


def _absorb(program: Program, product: _Product, node: fx.Node) -> bool:
    """Absorb one permute or one merging view into the product; False if none is left."""
    for side, view in enumerate(product.operands):
        if view.target is aten.permute.default:
            names = dict(zip(arguments(view)["dims"], product.names[side], strict=True))
            product.operands[side] = operand(view)
            product.names[side] = tuple(names[dim] for dim in range(len(names)))
            return True
    return any(
        view.target is aten.reshape.default and _absorb_merge(program, product, side, node)
        for side, view in enumerate(product.operands)
    )


def _absorb_merge(program: Program, product: _Product, side: int, node: fx.Node) -> bool:
    """Absorb a view that merged dims of an operand, if each can be split on the other operand or the result."""
    view = product.operands[side]
    source = operand(view)
    groups = merged_dims(program.type(source).shape, program.type(view).shape)
    if groups is None:
        return False
    merged = {name: group for name, group in zip(product.names[side], groups, strict=True) if len(group) != 1}
    if not all(_is_ready(program, product, side, name, group, node) for name, group in merged.items()):
        return False
    product.operands[side] = source
    other = product.operands[1 - side]
    dims = zip(product.names[1 - side], program.type(other).shape, strict=True)
    shape = tuple(size for name, merged_size in dims for size in merged.get(name, (merged_size,)))
    product.operands[1 - side] = _reshape(program, other, shape)
    product.names = [_split_names(names, merged) for names in product.names]
    product.out = _split_names(product.out, merged)
    return True


def _is_ready(program: Program, product: _Product, side: int, name: str, group: tuple[int, ...], node: fx.Node) -> bool:
    """Whether a dim can be split at no cost: a user of the result splits it, or the other operand merged it."""
    if name in product.out and name not in product.names[1 - side]:
        return any(_takes_apart(program, user, group) for user in node.users)
    other = product.operands[1 - side]
    while other.target is aten.permute.default:
        other = operand(other)
    return other.target is aten.reshape.default and _merges(program, operand(other), other, group)


def _takes_apart(program: Program, user: fx.Node, group: tuple[int, ...]) -> bool:
    if user.target is aten.permute.default:
        return any(_takes_apart(program, next_user, group) for next_user in user.users)
    return user.target is aten.reshape.default and _merges(program, user, operand(user), group)


def _merges(program: Program, apart: fx.Node, together: fx.Node, group: tuple[int, ...]) -> bool:
    """Whether a view from ``apart`` to ``together`` only merges dims, and merges dims of these sizes into one."""
    groups = merged_dims(program.type(apart).shape, program.type(together).shape)
    return groups is not None and group in groups


def merged_dims(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The sizes of ``src`` that each dim of ``dst`` merges, if the view does nothing but merge.

    >>> merged_dims((8, 16, 64), (128, 64))
    [(8, 16), (64,)]
    """
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in dst:
        group: tuple[int, ...] = ()
        while at < len(src) and (math.prod(group) < size or not group):
            group += (src[at],)
            at += 1
        if math.prod(group) != size:
            return None
        groups.append(group)
    return groups if at == len(src) and groups else None


def _split_names(names: Names, merged: dict[str, tuple[int, ...]]) -> Names:
    parts = [[f"{name}{i}" for i in range(len(merged[name]))] if name in merged else [name] for name in names]
    return tuple(chain.from_iterable(parts))


def _spec(product: _Product) -> str:
    """The names as single letters, in order of appearance."""
    sides = (*product.names, product.out)
    letters = {name: chr(ord("a") + i) for i, name in enumerate(dict.fromkeys(chain(*sides)))}
    left, right, out = (" ".join(map(letters.__getitem__, names)) for names in sides)
    return f"{left}, {right} -> {out}"


def _sum_unmerged(program: Program, node: fx.Node) -> None:
    """A sum over a dim that a view merged is a sum over the dims it merged."""
    view, dims = operand(node), arguments(node)["dim"]
    if view.target is not aten.reshape.default or not dims:
        return
    source = operand(view)
    groups = merged_dims(program.type(source).shape, program.type(view).shape)
    if groups is None:
        return
    summed = {dim % len(groups) for dim in dims}
    if any(len(group) != 1 for i, group in enumerate(groups) if i not in summed):
        return
    owners = [i for i, group in enumerate(groups) for _ in group]
    unmerged = [dim for dim, owner in enumerate(owners) if owner in summed]
    total = program.emit(aten.sum.dim_IntList, source, unmerged, False, like=node, **node.kwargs)
    program.replace(node, _reshape(program, total, program.type(node).shape))


def _reshape(program: Program, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """A value in a shape; the value itself if it has that shape."""
    if program.type(node).shape == shape:
        return node
    return program.insert(aten.reshape.default, (node, list(shape)), TensorType(shape, program.type(node).dtype), node)


def _join_reshapes(program: Program) -> None:
    """Join chains of views into one view each, and remove views back to the first shape."""
    for node in list(program.calls):
        if node.target is not aten.reshape.default:
            continue
        source = operand(node)
        while source.target is aten.reshape.default:
            source = operand(source)
        if program.type(source).shape == program.type(node).shape:
            program.replace(node, source)
        else:
            node.args = (source, node.args[1])
