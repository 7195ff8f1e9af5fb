"""localize: lowered -> localized. One program in local shapes, the same for every rank.

Types become those of one rank's shard, an op's sizes too, and what is an identity on any rank goes::

    y: f32[8@dp, 256@tp] = expand(b, [8, 256])      ->      y: f32[4, 128] = expand(b, [4, 128])

A type is local from here on; a sharding still says of which value it is a part. Invariant: the program's text names no
global size that is cut.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.collective import COLLECTIVES
from shardc.program import Program, is_getitem, op_rule
from shardc.rule import Call
from shardc.sharding import Sharding, TensorType


def localize(program: Program) -> Program:
    """The program that each rank runs."""
    program = program.copy(level="localized")
    for node in program.graph.nodes:
        if node.op != "output" and not is_getitem(node):
            types = tuple(map(_local_type, program.types(node), program.shardings(node), strict=True))
            program.set_type(node, types if program.has_many(node) else types[0])
        elif is_getitem(node):
            producer, index = program.value(node)
            program.set_type(node, program.types(producer)[index])
        program.forget_rule(node)
    for node in list(program.calls):
        if str(node.target) == "shardc.annotate.default":
            program.replace(node, node.args[0])  # type: ignore[arg-type]
        elif node.target not in COLLECTIVES:
            _localize_arguments(program, node)
    return program


def _local_type(type_: TensorType | None, sharding: Sharding | None) -> TensorType | None:
    if type_ is None or sharding is None:
        return type_
    return TensorType(sharding.local_shape(type_.shape), type_.dtype)


def _localize_arguments(program: Program, node: fx.Node) -> None:
    """Sizes that an op names become one rank's, as its rule says how."""
    found = op_rule(node.target)
    if found is None or found.local is None:
        return
    nodes: list[fx.Node] = []
    call = program.call(node)
    fx.map_arg((node.args, node.kwargs), lambda given: (nodes.append(given), given)[1])
    args, kwargs = found.local(call)
    left = iter(nodes)
    node.args, node.kwargs = _with_nodes((args, kwargs), left)


def _with_nodes(argument: Any, nodes: Any) -> Any:
    """The argument with the next node wherever it has a type."""
    if isinstance(argument, TensorType):
        return next(nodes)
    if isinstance(argument, (tuple, list)):
        return type(argument)(_with_nodes(item, nodes) for item in argument)
    if isinstance(argument, dict):
        return {key: _with_nodes(item, nodes) for key, item in argument.items()}
    return argument
