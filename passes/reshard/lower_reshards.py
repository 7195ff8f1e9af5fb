"""lower_reshards: agreed -> lowered. Each reshard becomes the cheapest sequence of collectives.

::

    y: f32[8@dp, 64]{sum tp} = mm(x, w)             y: f32[8@dp, 64]{sum tp} = mm(x, w)
    z: f32[8@dp, 64@tp] = reshard(y)         ->     z: f32[8@dp, 64@tp] = reduce_scatter(y, ("tp",), "sum", 1)

Where cuts in blocks change, views to one dim for each block level stand around the collectives. Windows of a cut dim
get the axes along which ranks exchange edges. Invariant: every value that was there has the sharding that it had, and
types stay global.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.program.collective import COLLECTIVES, EXCHANGES, Step, reshard
from shardc.program.program import Program

from .plan_reshard import plan_reshard

FUNCTIONS = {kind: function for function, kind in COLLECTIVES.items()} | {"view": torch.ops.aten.reshape.default}


def lower_reshards(program: Program) -> Program:
    """The program with collectives for reshards."""
    program = program.copy(level="lowered")
    for node in list(program.calls):
        if node.target is reshard:
            value: fx.Node = node.args[0]  # type: ignore[assignment]
            with program.graph.inserting_before(node):
                for step in plan_reshard(program.sharding(value), program.sharding(node), program.type(node)):
                    value = _insert(program, step, value, node)
            program.replace(node, value)
        elif node.target in EXCHANGES:
            moved, _, dim, *rest = node.args
            sharding = program.sharding(node)
            axes = sharding.dims[dim].axes  # type: ignore[index]
            node.args = (moved, tuple(map(sharding.mesh.print_part, axes)), dim, *rest)
    return program


def _insert(program: Program, step: Step, value: fx.Node, like: fx.Node) -> fx.Node:
    name = "_".join([step.kind, *dict.fromkeys(part.name for part in step.axes)])
    type_ = TensorType(step.shape, program.type(like).dtype)
    node = program.insert(FUNCTIONS[step.kind], (value, *step.args), type_, like, name=name)
    program.set_sharding(node, step.sharding)
    program.set_causes(node, program.causes(like))
    program.set_origins(node, program.origins(like))
    return node
