"""localize: lowered -> localized. One program in local shapes, the same for every rank.

Types become those of one rank's shard, an op's sizes too, and what is an identity on any rank goes::

    y: f32[8@dp, 256@tp] = expand(b, [8, 256])      ->      y: f32[4, 128] = expand(b, [4, 128])

A type is local from here on; a sharding still says of which value it is a part. Invariant: the program's text names no
global size that is cut.
"""

from __future__ import annotations

from torch import fx

from shardc.node import is_annotation, is_getitem, operand
from shardc.program import Program, op_rule
from shardc.rule import Call
from shardc.sharding import Sharding, TensorType


def localize(program: Program) -> Program:
    """The program that each rank runs."""
    program = program.copy(level="localized")
    calls = {node: program.call(node) for node in program.calls}
    for node in program.graph.nodes:
        if node.op != "output":
            _set_local_type(program, node)
    for node, call in calls.items():
        if is_annotation(node):
            program.replace(node, operand(node))
        else:
            _localize_arguments(program, node, call)
    return program


def _set_local_type(program: Program, node: fx.Node) -> None:
    program.forget_rule(node)
    if is_getitem(node):
        producer, index = program.value(node)
        program.set_type(node, program.types(producer)[index])
        return
    types = tuple(map(_local_type, program.types(node), program.shardings(node)))
    program.set_type(node, types if program.has_many(node) else types[0])


def _local_type(type_: TensorType | None, sharding: Sharding | None) -> TensorType | None:
    if type_ is None or sharding is None:
        return type_
    return TensorType(sharding.local_shape(type_.shape), type_.dtype)


def _localize_arguments(program: Program, node: fx.Node, call: Call) -> None:
    """Sizes that an op names become one rank's, as its rule says how."""
    found = op_rule(node.target)
    if found is None or found.local is None:
        return
    args = list(node.args)
    for position, argument in sorted(found.local(call, program.call(node)).items()):
        args[position : position + 1] = [argument]
    node.args = tuple(args)
