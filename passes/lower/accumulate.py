"""accumulate: agreed -> agreed. A sum over microbatches is added up before anything else is done with it.

::

    y: f32[64, 64]{sum microbatch dp}                 y: f32[64, 64]{sum microbatch dp}
    z: f32[64, 64] = reshard(y)                ->     a: f32[64, 64]{sum dp} = reshard(y);  z: f32[64, 64] = reshard(a)

So ranks exchange it once a step and not once a microbatch. What several stages add up, as the gradient of a tied weight
is, each of them adds up over microbatches by itself, and sends once a step. Invariant: every value that was there lies
as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import fx

from shardc.language.mesh import MICROBATCH
from shardc.program.collective import reshard
from shardc.program.node import is_cast, operand
from shardc.program.program import Program

from ..reshard.insert_reshards import insert_reshard
from .fuse_collectives import sum_of

aten = torch.ops.aten


def accumulate(program: Program) -> Program:
    """The program with reshards that reduce over microbatches alone; the same without a pipeline."""
    if program.options.pipeline is None:
        return program
    program = program.copy()
    for node in list(program.calls):
        if node.target is not reshard:
            continue
        value = operand(node)
        lies = program.sharding(value)
        rest = tuple((part, op) for part, op in lies.partial if part.name != MICROBATCH)
        added = replace(lies, partial=rest)
        if rest == lies.partial:
            continue
        with program.graph.inserting_before(node):
            values = list(_of_stages(program, value))
            if len(values) == 1 and added == program.sharding(node):
                continue
            total = _added(
                program, [insert_reshard(program, each, added, node, *program.causes(node)) for each in values]
            )
        if added == program.sharding(node):
            program.replace(node, total)
        else:
            node.args = (total,)
    program.remove_dead()
    return program


def _of_stages(program: Program, value: fx.Node) -> Iterator[fx.Node]:
    """For each stage that makes a part of a sum, the sum of its parts."""
    found: dict[int, list[fx.Node]] = {}
    for part in _parts(program, value):
        found.setdefault(program.source(part).stage, []).append(part)
    if len(found) == 1:
        yield value
    else:
        yield from (_added(program, parts) for parts in found.values())


def _parts(program: Program, value: fx.Node) -> list[fx.Node]:
    """The summands of a sum; of one that is cast to a wider dtype these are cast, before anything is rounded."""
    if len(value.users) > 1:
        return [value]
    if is_cast(value) and _itemsize(program, value) > _itemsize(program, operand(value)):
        parts = _parts(program, operand(value))
        return [value] if len(parts) == 1 else [_cast(program, value, part) for part in parts]
    if value.target is not aten.add.Tensor or value.kwargs:
        return [value]
    operands = list(value.args)
    if any(not isinstance(each, fx.Node) or program.sharding(each) != program.sharding(value) for each in operands):
        return [value]
    return [part for each in operands for part in _parts(program, each)]  # type: ignore[arg-type]


def _cast(program: Program, cast: fx.Node, part: fx.Node) -> fx.Node:
    """A part of what is cast, cast alike in the stage that makes it."""
    made = program.repeat(cast, {operand(cast): part})
    program.set_source(made, replace(program.source(made), stage=program.source(part).stage))
    return made


def _itemsize(program: Program, node: fx.Node) -> int:
    return program.type(node).dtype.itemsize


def _added(program: Program, values: Sequence[fx.Node]) -> fx.Node:
    return reduce(lambda total, value: sum_of(program, total, value, total), values)
