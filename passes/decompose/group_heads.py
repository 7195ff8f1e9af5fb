"""Let attention read the keys' own heads if a model repeats keys for the queries that share them.

Models of the library transformers repeat keys if there is a mask::

    k: f32[b, 2, t, d];  repeated: f32[b, 8, t, d] = reshape(expand(unsqueeze(k, 2), [b, 2, 4, t, d]))
    y = attention(q, repeated, ...)        ->        y = attention(q, k, ...)

If positions are cut, only a quarter of the keys then goes round, and a quarter is saved for backward. One kernel of
torch needs as many heads of keys as of queries: where it is not taken apart, keys are repeated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from shardc.ops.attention.layout import EFFICIENT, EFFICIENT_BACKWARD
from shardc.ops.attention.rules import BACKWARD, is_attention
from shardc.program.node import arguments, is_getitem, operand
from shardc.program.program import Program

from ..emitter import Emitter
from .share_heads import HEADS

aten = torch.ops.aten
KEYS = {"key": 1, "value": 2}  # arguments of attention, each with the place of its gradient among results of backward


def repeating(program: Program) -> list[fx.Node]:
    """Attention whose keys are repeated for all heads of queries, and its backward, if gradients are then summed."""
    found = list[fx.Node]()
    for node in filter(lambda each: is_attention(each.target), program.calls):
        sources = [_source(program, arguments(node)[name]) for name in KEYS]
        heads = {program.type(source).shape[HEADS] for source in sources if source is not None}
        if None not in sources and len(heads) == 1 and _sums(program, node) is not None:
            found.append(node)
    return found


def num_key_heads(program: Program, node: fx.Node) -> int:
    """The number of heads of keys before they are repeated, for one of ``repeating``."""
    source = _source(program, arguments(node)["key"])
    assert source is not None
    return program.type(source).shape[HEADS]


def group_heads(program: Program, nodes: Iterable[fx.Node]) -> None:
    """Let these nodes of ``repeating`` read the keys before they are repeated, and return the gradients of those."""
    for node in nodes:
        emit, sums = Emitter(program, node), _sums(program, node) or {}
        with program.graph.inserting_before(node):
            sources = {name: _source(program, emit.given[name]) for name in KEYS}
            results = _again(emit, sources)
            for place, total in sums.items():
                gradient, parts = results[place], operand(total)
                assert gradient is not None
                gradient = emit(aten.reshape.default, gradient, list(program.type(total).shape))
                program.replace(total, emit.cast(gradient, program.type(total).dtype))
                program.graph.erase_node(parts)
        program.replace(node, results)


def repeat_heads(program: Program) -> Program:
    """The program with keys repeated again for the kernel that needs all heads; itself if it has no such kernel."""
    if not any(_lacks_heads(program, node) for node in program.calls):
        return program
    program = program.copy(level="canonical")
    for node in [node for node in program.calls if _lacks_heads(program, node)]:
        emit = Emitter(program, node)
        heads = emit.shape(emit.given["query"])[HEADS]
        with program.graph.inserting_before(node):
            repeated = {name: _repeated(emit, emit.given[name], heads) for name in KEYS}
            results = _again(emit, repeated)
            for name, place in KEYS.items() if _is_backward(node) else ():
                batch, few, *rest = emit.shape(emit.given[name])
                gradient = results[place]
                if gradient is not None:
                    parts = emit(aten.reshape.default, gradient, [batch, few, heads // few, *rest])
                    results[place] = emit.cast(emit.sum(parts, [HEADS + 1]), emit.type(gradient).dtype)
        program.replace(node, results)
    return program


def _again(emit: Emitter, instead: Mapping[str, fx.Node | None]) -> list[fx.Node | None]:
    """The results of the call with other keys and values; their gradients get the types of these.

    Torch's own inference assumes as many heads of keys as of queries.
    """
    program, node = emit.program, emit.node
    names, args, types = list(emit.given), list(node.args), list(program.types(node))
    for name, x in instead.items():
        assert x is not None
        args[names.index(name)] = x
        if _is_backward(node) and types[KEYS[name]] is not None:
            types[KEYS[name]] = emit.type(x)
    return emit.results(program.insert(node.target, tuple(args), tuple(types), node, node.kwargs))


def _source(program: Program, x: fx.Node) -> fx.Node | None:
    """The value whose heads are repeated, each several times in a row; None for other values."""
    if x.target is not aten.reshape.default or operand(x).target is not aten.expand.default:
        return None
    inserted = operand(operand(x))
    if inserted.target is not aten.unsqueeze.default or len(program.type(operand(inserted)).shape) != 4:
        return None
    source, repeated = operand(inserted), program.type(operand(x)).shape
    batch, heads, *rest = program.type(source).shape
    count = repeated[HEADS + 1]
    is_repeated = repeated == (batch, heads, count, *rest) and program.type(x).shape == (batch, heads * count, *rest)
    return source if is_repeated and inserted.args[1] in (HEADS + 1, -len(rest) - 1) else None


def _sums(program: Program, node: fx.Node) -> Mapping[int, fx.Node] | None:
    """The sums over repeated heads of the gradients of keys and values; None if the gradients have other readers."""
    found = dict[int, fx.Node]()
    for item in filter(is_getitem, node.users) if _is_backward(node) else ():
        name = next((name for name, place in KEYS.items() if place == item.args[1]), None)
        if name is None:
            continue
        parts = next(iter(item.users), None)
        total = None if parts is None else next(iter(parts.users), None)
        if parts is None or total is None or len(item.users) > 1 or len(parts.users) > 1:
            return None
        if parts.target is not aten.reshape.default or total.target is not aten.sum.dim_IntList:
            return None
        expanded = operand(arguments(node)[name])
        if program.type(parts).shape != program.type(expanded).shape or list(arguments(total)["dim"]) != [HEADS + 1]:
            return None
        found[item.args[1]] = total  # type: ignore[index]
    return found


def _is_backward(node: fx.Node) -> bool:
    return node.target in BACKWARD


def _lacks_heads(program: Program, node: fx.Node) -> bool:
    if node.target not in (EFFICIENT, EFFICIENT_BACKWARD):
        return False
    given = arguments(node)
    return program.type(given["key"]).shape[HEADS] != program.type(given["query"]).shape[HEADS]


def _repeated(emit: Emitter, x: fx.Node, heads: int) -> fx.Node:
    batch, few, *rest = emit.shape(x)
    expanded = emit(aten.expand.default, emit(aten.unsqueeze.default, x, HEADS + 1), [batch, few, heads // few, *rest])
    return emit(aten.reshape.default, expanded, [batch, heads, *rest])
