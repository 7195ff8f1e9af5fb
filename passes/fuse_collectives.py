"""fuse_collectives: lowered -> lowered. Fewer and cheaper collectives for the same values.

In order: partial sums are added before they are reduced, an all_reduce of which only pieces are used becomes a
reduce_scatter, and equal collectives are done once::

    a = all_reduce(x, tp);  s = add(r, a)           t = add(x, y)
    b = all_reduce(y, tp);  t = add(s, b)     ->    c = all_reduce(t, tp);  u = add(r, c)

Invariant: every value that is left lies as before.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.collective import COLLECTIVES, all_reduce, reduce_scatter, shard_slice
from shardc.program import Program

aten = torch.ops.aten


def fuse_collectives(program: Program) -> Program:
    """The program with fewer and cheaper collectives."""
    program = program.copy()
    _share_equal(program)
    for node in reversed(list(program.calls)):
        if _is_sum(node) and not _is_inner_sum(node):
            _add_before_reducing(program, node)
    for node in list(program.calls):
        if node.target is all_reduce:
            _scatter_where_sliced(program, node)
    program.remove_dead()
    return program


def _share_equal(program: Program) -> None:
    seen: dict[object, fx.Node] = {}
    for node in list(program.calls):
        if node.target in COLLECTIVES:
            key = (node.target, node.args)
            if key in seen:
                program.replace(node, seen[key])
            else:
                seen[key] = node


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)


def _is_inner_sum(node: fx.Node) -> bool:
    """Whether the sum is but a summand of one other sum."""
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _summands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for arg in node.args:
        assert isinstance(arg, fx.Node)
        found += _summands(arg) if _is_sum(arg) and len(arg.users) == 1 else [arg]
    return found


def _add_before_reducing(program: Program, node: fx.Node) -> None:
    """Of a sum's summands, those that are all_reduces over the same axes become one all_reduce of their sum."""
    type_ = program.type(node)
    groups: dict[object, list[fx.Node]] = {}
    rest: list[fx.Node] = []
    for summand in _summands(node):
        if _can_wait(program, summand) and program.type(summand) == type_:
            groups.setdefault((summand.args[1:], program.sharding(summand)), []).append(summand)
        else:
            rest.append(summand)
    if all(len(group) == 1 for group in groups.values()):
        return
    with program.graph.inserting_before(node):
        total = [*rest, *(_reduce_once(program, group) for group in groups.values())]
        result = total[0]
        for summand in total[1:]:
            result = _sum_of(program, result, summand, node)
    program.replace(node, result)


def _can_wait(program: Program, node: fx.Node) -> bool:
    return node.target is all_reduce and node.args[2] == "sum" and len(node.users) == 1


def _reduce_once(program: Program, group: list[fx.Node]) -> fx.Node:
    first = group[0]
    partial = first.args[0]
    for other in group[1:]:
        partial = _sum_of(program, partial, other.args[0], other)  # type: ignore[arg-type]
    if len(group) == 1:
        return first
    result = program.insert(all_reduce, (partial, *first.args[1:]), program.type(first), first)
    program.set_sharding(result, program.sharding(first))
    program.set_cause(result, program.cause(first))
    program.set_origins(result, program.origins(first))
    return result


def _sum_of(program: Program, one: fx.Node, other: fx.Node, like: fx.Node) -> fx.Node:
    result = program.insert(aten.add.Tensor, (one, other), program.type(like), like)
    program.set_sharding(result, program.sharding(one))
    program.set_origins(result, program.origins(one))
    return result


def _scatter_where_sliced(program: Program, node: fx.Node) -> None:
    """all_reduce of which every user takes the same slice along the same axes: reduce_scatter."""
    slices = list(node.users)
    axes = node.args[1]
    if not slices or any(user.target is not shard_slice or user.args[1:] != slices[0].args[1:] for user in slices):
        return
    if slices[0].args[1] != axes:
        return
    with program.graph.inserting_before(node):
        result = program.insert(reduce_scatter, (*node.args, slices[0].args[2]), program.type(node), node)
    program.set_sharding(result, program.sharding(slices[0]))
    program.set_cause(result, program.cause(node))
    program.set_origins(result, program.origins(slices[0]))
    for user in slices:
        program.replace(user, result)
