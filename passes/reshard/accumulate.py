"""accumulate: agreed -> agreed. A sum over microbatches is added up before anything else is done with it.

::

    y: f32[64, 64]{sum microbatch dp}                 y: f32[64, 64]{sum microbatch dp}
    z: f32[64, 64] = reshard(y)                ->     a: f32[64, 64]{sum dp} = reshard(y);  z: f32[64, 64] = reshard(a)

So ranks exchange the sum once a step and not once a microbatch. Where several stages compute summands, as of the
gradient of a tied weight, each adds up its own over microbatches, and sends once a step. Invariant: every value that
was there has the sharding that it had.
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
    """The program with reshards that reduce over microbatches alone; the same without a pipeline."""
    if program.options.pipeline is None:
        return program
    program = program.copy()
    for node in list(program.calls):
        if node.target is reshard:
            _accumulate_first(program, node)
    program.remove_dead()
    return program


def _accumulate_first(program: Program, node: fx.Node) -> None:
    """Let another reshard before this one reduce over microbatches."""
    value = operand(node)
    sharding, target = program.sharding(value), program.sharding(node)
    rest = tuple((part, op) for part, op in sharding.partial if part.name != MICROBATCH)
    if rest == sharding.partial:
        return
    accumulated = replace(sharding, partial=rest)
    with program.graph.inserting_before(node):
        by_stage: dict[int, list[fx.Node]] = {}
        for summand in _summands(program, value):
            by_stage.setdefault(program.source(summand).stage, []).append(summand)
        if len(by_stage) == 1 and accumulated == target:
            return
        sums = [_add(program, summands) for summands in by_stage.values()] if len(by_stage) > 1 else [value]
        causes = program.causes(node)
        total = _add(program, [insert_reshard(program, stage_sum, accumulated, node, *causes) for stage_sum in sums])
    if accumulated == target:
        program.replace(node, total)
    else:
        node.args = (total,)


def _summands(program: Program, value: fx.Node) -> list[fx.Node]:
    """The summands of a sum. If that is cast to a wider dtype each is cast, in the stage that computes it."""
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
    if value.target is not aten.add.Tensor or value.kwargs:
        return [value]
    nodes = [each for each in value.args if isinstance(each, fx.Node)]
    if len(nodes) < len(value.args) or any(program.sharding(each) != program.sharding(value) for each in nodes):
        return [value]
    return [summand for each in nodes for summand in _summands(program, each)]


def _add(program: Program, values: Sequence[fx.Node]) -> fx.Node:
    return reduce(lambda total, value: insert_sum(program, total, value, total), values)


def insert_sum(program: Program, one: fx.Node, other: fx.Node, like: fx.Node) -> fx.Node:
    """Insert the sum of two values of one sharding, with the type and source of ``like``."""
    result = program.insert(aten.add.Tensor, (one, other), program.type(like), like)
    program.set_sharding(result, program.sharding(one))
    program.set_origins(result, program.origins(one))
    return result
