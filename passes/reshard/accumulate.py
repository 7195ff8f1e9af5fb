"""accumulate: agreed -> agreed. A sum over microbatches is added up before anything else is done with it.

::

    y: f32[64, 64]{sum microbatch dp}                 y: f32[64, 64]{sum microbatch dp}
    z: f32[64, 64] = reshard(y)                ->     a: f32[64, 64]{sum dp} = reshard(y);  z: f32[64, 64] = reshard(a)

So ranks exchange the sum once a step and not once a microbatch. If several stages compute summands, such as those of
the gradient of a tied weight, each adds up its own over microbatches and sends once a step. Invariant: every existing
value keeps its sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import fx

from shardc.language.mesh import MICROBATCH
from shardc.program.collective import reshard
from shardc.program.node import is_cast, operand
from shardc.program.program import Program

from .insert_reshards import insert_reshard

aten = torch.ops.aten


def accumulate(program: Program) -> Program:
    """The program with separate reshards that reduce over microbatches; unchanged without a pipeline."""
    if program.options.pipeline is None:
        return program
    program = program.edited()
    for node in [node for node in program.calls if node.target is reshard]:
        value, target, causes = operand(node), program.sharding(node), program.causes(node)
        rest = tuple((part, op) for part, op in program.sharding(value).partial if part.name != MICROBATCH)
        accumulated = replace(program.sharding(value), partial=rest)
        is_left_open = any(part.name == MICROBATCH for part in target.partial_axes)
        if is_left_open or accumulated == program.sharding(value):
            continue
        with program.graph.inserting_before(node):
            by_stage: dict[int, list[fx.Node]] = {}
            for summand in _summands(program, value):
                by_stage.setdefault(program.source(summand).stage, []).append(summand)
            if len(by_stage) == 1 and accumulated == target:
                continue
            sums = [_add(program, summands) for summands in by_stage.values()] if len(by_stage) > 1 else [value]
            total = _add(program, [insert_reshard(program, stage, accumulated, node, *causes) for stage in sums])
        if accumulated == target:
            program.replace(node, total)
        else:
            node.args = (total,)
    program.remove_dead()
    return program


def _summands(program: Program, value: fx.Node) -> list[fx.Node]:
    """The summands of a sum. If it is cast to a wider dtype, each summand is cast in the stage that computes it."""
    if len(value.users) > 1:
        return [value]
    if is_cast(value) and program.type(value).dtype.itemsize > program.type(operand(value)).dtype.itemsize:
        narrow = _summands(program, operand(value))
        if len(narrow) == 1:
            return [value]
        casts = [program.repeat(value, {operand(value): summand}) for summand in narrow]
        for cast, summand in zip(casts, narrow, strict=True):
            program.set_source(cast, replace(program.source(cast), stage=program.source(summand).stage))
        return casts
    nodes = [arg for arg in value.args if isinstance(arg, fx.Node)]
    is_sum = value.target is aten.add.Tensor and not value.kwargs and len(nodes) == len(value.args)
    if not is_sum or any(program.sharding(node) != program.sharding(value) for node in nodes):
        return [value]
    return [summand for node in nodes for summand in _summands(program, node)]


def _add(program: Program, values: Sequence[fx.Node]) -> fx.Node:
    return reduce(lambda total, value: insert_sum(program, total, value, total), values)


def insert_sum(program: Program, one: fx.Node, other: fx.Node, like: fx.Node) -> fx.Node:
    """Insert the sum of two values of one sharding, with the type and source of ``like``."""
    result = program.insert(aten.add.Tensor, (one, other), program.type(like), like)
    program.set_sharding(result, program.sharding(one))
    program.set_origins(result, program.origins(one))
    return result
