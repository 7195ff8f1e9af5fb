"""localize: lowered -> localized. One program in local shapes, the same for every rank.

Types, and the sizes among ops' arguments, become those of one rank's shard. Annotations in the model are removed::

    y: f32[8@dp, 256@tp] = expand(b, [8, 256])      ->      y: f32[4, 128] = expand(b, [4, 128])

Collectives cut and join equal pieces: an unevenly cut dim is made longer before, or cut short after::

    y: f32[5] = all_gather(x)     ->      g: f32[6] = all_gather(x);  y: f32[5] = fit(g, 0, 5)

Types are local from here on; a sharding still says which part of the whole value a rank has. Invariant: the program's
text names no global size of a cut dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops import op_rule
from shardc.ops.piece import fit
from shardc.program.coding.local import local_call
from shardc.program.coding.nodes import CODINGS
from shardc.program.collective import Fit, fits, group_size
from shardc.program.communication import Member, members, results, set_operand
from shardc.program.node import is_annotation, is_getitem, operand
from shardc.program.program import Program


def localize(program: Program) -> Program:
    """The program that each rank runs."""
    program = program.edited("localized")
    calls = {node: program.call(node) for node in program.calls}
    for node in program.graph.nodes:
        if node.op != "output":
            _set_local_types(program, node)
    coded = {node: local_call(program, node) for node in calls if node.target in CODINGS}
    for node, local in coded.items():
        node.target, node.args = local
    uneven = list(_uneven(program))
    for node, call in calls.items():
        rule = op_rule(node.target)
        if is_annotation(node):
            program.replace(node, operand(node))
        elif rule is not None and rule.local is not None:  # sizes among its arguments become one rank's
            args = list(node.args)
            for position, argument in sorted(rule.local(call, program.call(node)).items()):
                args[position : position + 1] = [argument]
            node.args = tuple(args)
    for node, part, before, after in uneven:
        _fit(program, node, members(node)[part.index], before, after)  # whose operand may be cut short by now
    return program


def changes_work(program: Program) -> bool:
    """Whether a rank computes more in the localized program, since collectives cut or join unequal pieces."""
    return next(_uneven(program), None) is not None


def _uneven(program: Program) -> Iterator[tuple[fx.Node, Member, Fit | None, Fit | None]]:
    """The collectives whose operand must be made longer, or whose result must be cut short."""
    for node in program.calls:
        for part in members(node):
            before, after = _fits(program, node, part)
            if before or after:
                yield node, part, before, after


def _set_local_types(program: Program, node: fx.Node) -> None:
    if node.op == "call_function" and not is_getitem(node) and not members(node):
        program.is_fallback(node)  # cached while the call's types are global
    program.forget_rule(node)
    if is_getitem(node):
        producer, index = program.value(node)
        program.set_type(node, program.types(producer)[index])
        return
    pairs = zip(program.types(node), program.shardings(node), strict=False)
    types = [TensorType(cut.local_shape(type_.shape), type_.dtype) if type_ and cut else type_ for type_, cut in pairs]
    program.set_local_types(node, tuple(types))


def _fits(program: Program, node: fx.Node, part: Member) -> tuple[Fit | None, Fit | None]:
    src, dst = program.local_type(part.operand), program.local_type(node, part.index)
    assert src is not None and dst is not None and program.mesh is not None, node
    return fits(part.kind, part.args, group_size(program.mesh, part.kind, part.args), src.shape, dst.shape)


def _fit(program: Program, node: fx.Node, part: Member, before: Fit | None, after: Fit | None) -> None:
    """Make the operand of a collective longer, or cut its result short, so that its pieces are equal."""
    assert program.mesh is not None
    if before is not None:
        with program.graph.inserting_before(node):
            set_operand(node, part, _fitted(program, part.operand, before, node))
    if after is None:
        return
    for result in list(results(node, part)):
        users = list(result.users)
        with program.graph.inserting_after(result):
            fitted = _fitted(program, result, after, node)
        for user in users:
            user.replace_input_with(result, fitted)
        dim, types, shape = after[0], list(program.types(node)), list(program.type(result).shape)
        length = program.value_type(program.value(part.operand)).shape[dim]
        shape[dim] = length * group_size(program.mesh, part.kind, part.args)
        types[part.index] = TensorType(tuple(shape), program.type(result).dtype)
        program.set_type(node, tuple(types) if program.has_many(node) else types[0])
        program.set_type(result, types[part.index])


def _fitted(program: Program, value: fx.Node, to: Fit, like: fx.Node) -> fx.Node:
    new = program.emit(fit, value, *to, like=like)
    program.set_global_types(new, (program.global_type(value),))
    program.set_sharding(new, program.sharding(value))
    program.set_origins(new, (program.origin(value),))
    return new
