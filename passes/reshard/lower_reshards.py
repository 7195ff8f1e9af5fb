"""lower_reshards: agreed -> lowered. Each reshard becomes the cheapest sequence of collectives.

::

    y: f32[8@dp, 64]{sum tp} = dot(x, w, "a b, b c -> a c")
    z: f32[8@dp, 64@tp] = reshard(y)

becomes::

    y: f32[8@dp, 64]{sum tp} = dot(x, w, "a b, b c -> a c")
    z: f32[8@dp, 64@tp] = reduce_scatter(y, ("tp",), "sum", 1)

If cuts in blocks change, views to one dim for each block level stand around the collectives. Windows of a cut dim get
the axes along which ranks exchange edges. A value that is one number everywhere is made again instead of sent.
Invariant: every existing value keeps its sharding, and types stay global.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.language.sharding import Sharding, TensorType
from shardc.program.collective import COLLECTIVES, EXCHANGES, reshard
from shardc.program.node import is_uniform, operand
from shardc.program.program import Program

from .plan_reshard import move_bytes, plan_reshard

FUNCTIONS = {kind: function for function, kind in COLLECTIVES.items()} | {"view": torch.ops.aten.reshape.default}


def lower_reshards(program: Program) -> Program:
    """The program with collectives in place of reshards."""
    program = program.edited("lowered")
    for node in list(program.calls):
        if node.target is reshard and is_uniform(operand(node)) and _sends(program, node):
            value = operand(node)
            with program.graph.inserting_before(node):
                new = program.insert(value.target, value.args, program.type(node), node, value.kwargs)
            program.set_sharding(new, program.sharding(node))
            program.set_origins(new, program.origins(node))
            program.replace(node, new)
            if not value.users:
                program.replace(value, new)
        elif node.target is reshard:
            value, type_ = operand(node), program.type(node)
            with program.graph.inserting_before(node):
                for step in plan_reshard(program.sharding(value), program.sharding(node), type_):
                    name = "_".join([step.kind, *dict.fromkeys(part.name for part in step.axes)])
                    result = TensorType(step.shape, type_.dtype)
                    if step.kind == "view" and _is_view_back(program, value, result, step.sharding):
                        value = operand(value)
                        continue
                    value = program.insert(FUNCTIONS[step.kind], (value, *step.args), result, node, name=name)
                    program.set_sharding(value, step.sharding)
                    program.set_causes(value, program.causes(node))
                    program.set_origins(value, program.origins(node))
            program.replace(node, value)
        elif node.target in EXCHANGES:
            moved, _, dim, *rest = node.args
            sharding = program.sharding(node)
            axes = sharding.dims[dim].axes  # type: ignore[index]
            node.args = (moved, tuple(map(sharding.mesh.print_part, axes)), dim, *rest)
    program.remove_dead()
    return program


def _is_view_back(program: Program, node: fx.Node, type_: TensorType, sharding: Sharding) -> bool:
    """Whether a node views a value of this type and sharding."""
    if node.target is not FUNCTIONS["view"] or operand(node).op != "call_function":
        return False
    return program.value_type(program.value(operand(node))) == type_ and program.sharding(operand(node)) == sharding


def _sends(program: Program, node: fx.Node) -> bool:
    return move_bytes(program.sharding(operand(node)), program.sharding(node), program.type(node)) > 0
