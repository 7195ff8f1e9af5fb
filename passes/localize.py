"""localize: lowered -> localized. One program in local shapes, the same for every rank.

Types become those of one rank's shard, an op's sizes too, and what is an identity on any rank goes::

    y: f32[8@dp, 256@tp] = expand(b, [8, 256])      ->      y: f32[4, 128] = expand(b, [4, 128])

Collectives cut and join equal pieces: where a dim is cut unevenly it is made longer before, or cut short after::

    y: f32[5] = all_gather(x)     ->      g: f32[6] = all_gather(x);  y: f32[5] = fit(g, 0, 5)

A type is local from here on; a sharding still says of which value it is a part. Invariant: the program's text names no
global size that is cut.
"""

from __future__ import annotations

from torch import fx

from shardc.collective import COLLECTIVES, Fit, collective_kind, fits, group_size
from shardc.node import is_annotation, is_getitem, operand
from shardc.ops.padding import fit
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
    uneven = {node: _fits(program, node) for node in calls if node.target in COLLECTIVES}
    for node, call in calls.items():
        if is_annotation(node):
            program.replace(node, operand(node))
        else:
            _localize_arguments(program, node, call)
    for node, (before, after) in uneven.items():
        _fit(program, node, before, after)
    return program


def _set_local_type(program: Program, node: fx.Node) -> None:
    if node.op == "call_function" and not is_getitem(node) and node.target not in COLLECTIVES:
        program.is_fallback(node)  # said of the call in global types
    program.forget_rule(node)
    if is_getitem(node):
        producer, index = program.value(node)
        program.set_type(node, program.types(producer)[index])
        return
    program.set_local_types(node, tuple(map(_local_type, program.types(node), program.shardings(node))))


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


def _fits(program: Program, node: fx.Node) -> tuple[Fit | None, Fit | None]:
    kind, taken, made = collective_kind(node), program.local_type(operand(node)), program.local_type(node)
    assert taken is not None and made is not None and program.mesh is not None, node
    return fits(kind, node.args[1:], group_size(program.mesh, kind, node.args[1:]), taken.shape, made.shape)


def _fit(program: Program, node: fx.Node, before: Fit | None, after: Fit | None) -> None:
    """Put around a collective what makes its pieces equal."""
    if before is not None:
        with program.graph.inserting_before(node):
            node.args = (_fitted(program, operand(node), before, node), *node.args[1:])
    if after is not None:
        assert program.mesh is not None
        users = list(node.users)
        with program.graph.inserting_after(node):
            fitted = _fitted(program, node, after, node)
        for user in users:
            user.replace_input_with(node, fitted)
        dim, count = after[0], group_size(program.mesh, collective_kind(node), node.args[1:])
        joined = list(program.type(node).shape)
        joined[dim] = program.value_type(program.value(operand(node))).shape[dim] * count
        program.set_type(node, TensorType(tuple(joined), program.type(node).dtype))


def _fitted(program: Program, value: fx.Node, to: Fit, like: fx.Node) -> fx.Node:
    new = program.emit(fit, value, *to, like=like)
    program.set_global_types(new, (program.global_type(value),))
    program.set_sharding(new, program.sharding(value))
    program.set_origins(new, (program.origin(value),))
    return new
