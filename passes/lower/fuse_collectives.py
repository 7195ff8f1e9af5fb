"""fuse_collectives: lowered -> lowered. Fewer and cheaper collectives for the same values.

In order: equal collectives are done once, partial sums are added before they are reduced, and an all_reduce whose
readers use only pieces becomes a reduce_scatter::

    a = all_reduce(x, tp);  s = add(r, a)           t = add(x, y)
    b = all_reduce(y, tp);  t = add(s, b)     ->    c = all_reduce(t, tp);  u = add(r, c)

Invariant: every value that is left keeps its sharding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from shardc.program.collective import COLLECTIVES, EXCHANGES, adds_microbatches, all_reduce, reduce_scatter, shard_slice
from shardc.program.communication import is_early
from shardc.program.node import operand
from shardc.program.program import Program
from shardc.program.provenance import ShardingChange

from ..reshard.accumulate import insert_sum
from ..reshard.insert_reshards import endpoint

aten = torch.ops.aten


def fuse_collectives(program: Program) -> Program:
    """The program with fewer and cheaper collectives."""
    program = program.edited()
    # ZeRO-3 gathers a parameter again in each phase; in a pipeline once for both.
    is_freed = program.options.zero is not None and program.options.pipeline is None
    first: dict[object, fx.Node] = {}
    for node in list(program.calls):
        if node.target in COLLECTIVES or node.target in EXCHANGES:
            phase = program.source(node).phase if is_freed and is_early(node) else ""
            equal = first.setdefault((node.target, node.args, phase), node)
            if equal is not node:
                program.replace(node, equal)
    for node in reversed(list(program.calls)):
        if _is_sum(node) and not _is_inner_sum(program, node):
            _add_before_reducing(program, node)
    for node in list(program.calls):
        if node.target is all_reduce:
            _scatter_where_sliced(program, node)
    program.remove_dead()
    return program


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)


def _is_inner_sum(program: Program, node: fx.Node) -> bool:
    """Whether the only reader of a sum is another sum, which does not broadcast it."""
    users = list(node.users)
    return len(users) == 1 and _is_sum(users[0]) and program.type(users[0]) == program.type(node)


def _summands(program: Program, node: fx.Node) -> list[fx.Node]:
    summands: list[fx.Node] = []
    for summand in (operand(node, 0), operand(node, 1)):
        is_inner = _is_sum(summand) and _is_inner_sum(program, summand)
        summands += _summands(program, summand) if is_inner else [summand]
    return summands


def _add_before_reducing(program: Program, node: fx.Node) -> None:
    """Replace reductions of summands that are alike, over the same axes, by one reduction of their sum."""
    groups: dict[object, list[fx.Node]] = {}
    rest: list[fx.Node] = []
    for summand in _summands(program, node):
        is_reduced = summand.target in (all_reduce, reduce_scatter) and summand.args[2] == "sum"
        if is_reduced and len(summand.users) == 1 and program.type(summand) == program.type(node):
            stage = program.source(operand(summand)).stage if adds_microbatches(summand) else None  # one sum a stage
            key = (summand.target, summand.args[1:], program.sharding(summand), stage)
            groups.setdefault(key, []).append(summand)
        else:
            rest.append(summand)
    if all(len(group) == 1 for group in groups.values()):
        return
    with program.graph.inserting_before(node):
        total = [*rest, *(_reduce_once(program, group) for group in groups.values())]
        total.sort(key=lambda each: program.value_type(program.value(each)) != program.type(node))  # a bias comes last
        result = total[0]
        for summand in total[1:]:
            result = insert_sum(program, result, summand, node)
    program.replace(node, result)


def _reduce_once(program: Program, group: list[fx.Node]) -> fx.Node:
    """One reduction, of the sum of the operands of several reductions."""
    first, *others = group
    if not others:
        return first
    partial = operand(first)
    for other in others:
        partial = insert_sum(program, partial, operand(other), other)
    result = program.insert(first.target, (partial, *first.args[1:]), program.type(first), first, name=first.name)
    added = tuple(cause for other in others for cause in program.causes(other))
    value, origins = endpoint(program, partial), program.origin(partial)
    causes = [
        replace(cause, value=value, origins=origins, added=cause.added + added)
        if isinstance(cause, ShardingChange)
        else cause
        for cause in program.causes(first)
    ]
    program.set_sharding(result, program.sharding(first))
    program.set_causes(result, tuple(causes))
    program.set_origins(result, program.origins(first))
    return result


def _scatter_where_sliced(program: Program, node: fx.Node) -> None:
    """Turn an all_reduce into a reduce_scatter if every user takes the same slice along the same axes."""
    slices = list(node.users)
    if not slices or any(user.target is not shard_slice for user in slices):
        return
    first = slices[0]
    if first.args[1] != node.args[1] or any(user.args[1:] != first.args[1:] for user in slices):
        return
    with program.graph.inserting_before(node):
        name = node.name.replace("all_reduce", "reduce_scatter")
        result = program.insert(reduce_scatter, (*node.args, first.args[2]), program.type(node), node, name=name)
    program.set_sharding(result, program.sharding(first))
    program.set_causes(result, program.causes(node))
    program.set_origins(result, program.origins(first))
    for user in slices:
        program.replace(user, result)
