"""Checks, after every pass, of the invariants of the program's level.

A failure is a fault of the compiler, never of the user, so it is an AssertionError that names the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.language.cut import dims_sharding, extends, factor_cuts, has_same_shards
from shardc.language.mesh import MICROBATCH, AxisPart
from shardc.language.partition import parse_parts
from shardc.language.rule import OpCall, Rule, make_rule
from shardc.language.sharding import WHOLE, DimSharding, ReduceOp, Sharding, TensorType, open_reductions
from shardc.language.words import LEVELS, Level
from shardc.ops.contraction import DOT_RINGS, gather_dots
from shardc.program.coding.nodes import CODINGS
from shardc.program.collective import EXCHANGES, reshard, steps_sharding
from shardc.program.communication import members
from shardc.program.node import is_annotation, is_getitem
from shardc.program.program import Check, Program, Value, ends_of

from .canonicalize.keep_dims import SPECS


def verify(program: Program) -> None:
    """Check every invariant of the program's level, and those of the levels before that still hold."""
    program.graph.lint()
    level = LEVELS.index(program.level)
    of_nodes = NODE_CHECKS[program.level]
    _check_ends(program)
    if of_nodes is not CAPTURED:
        _check_products(program)
    for node in program.graph.nodes:
        if node.op != "output":
            program.check_once(node, of_nodes)
    for of_level, check in CHECKS.items():
        if LEVELS.index(of_level) <= level:
            check(program)


def _check_ends(program: Program) -> None:
    """Every input and every result has a description."""
    num, num_described = len(program.placeholders), len(program.inputs)
    assert num == num_described, f"{num} placeholders, {num_described} inputs are described"
    num, num_described = len(program.results), len(program.outputs)
    assert num == num_described, f"{num} results, {num_described} outputs are described"


def _check_products(program: Program) -> None:
    """Contractions are dots."""
    for target in SPECS:
        for node in program.graph.find_nodes(op="call_function", target=target):
            raise AssertionError(f"{node} = {target} should be a dot")


def _is_typed_and_pure(program: Program, node: fx.Node) -> None:
    """A node has types, and its op is pure."""
    assert node.op in ("placeholder", "call_function"), f"{node.op} {node}"
    assert any(program.types(node)) or program.has_many(node), f"{node} has no type"
    schema = getattr(node.target, "_schema", None)
    assert schema is None or not schema.is_mutable, f"{node} = {node.target} changes its operand"


def _is_annotated(program: Program, node: fx.Node) -> None:
    """A value has a sharding."""
    if is_getitem(node):
        return
    types, shardings = program.types(node), program.shardings(node)
    assert len(shardings) == len(types), f"{node} has no sharding"
    for type_, sharding in zip(types, shardings, strict=True):
        assert (type_ is None) == (sharding is None), f"{node}: {type_} with {sharding}"
        if type_ is not None and sharding is not None:
            assert len(sharding.dims) == len(type_.shape), f"{node}: {sharding} on {type_}"


def _check_results(program: Program) -> None:
    """No result is partial, and a gradient or new buffer is cut as its owner."""
    for output, result in zip(program.outputs, program.results, strict=True):
        assert result is None or not program.sharding(result).partial, f"output {output.name} is a partial sum"
    kinds = {node: kind for (kind, _), node in program.named_inputs.items()}
    for output, owner, result in ends_of(program):
        if result is not None and owner is not None and output.kind in ("gradient", "buffer", "changed", "residual"):
            sharding, expected = program.sharding(result), program.sharding(owner)
            assert sharding == expected, (
                f"{output.kind} {output.name}: {sharding}, but the {kinds[owner]} is {expected}"
            )


def _check_lowered(program: Program) -> None:
    """No reshard is left, and collectives make the shardings of their results."""
    for node in program.calls:
        assert node.target is not reshard, f"{node} is not lowered"
        for part in members(node):
            result = steps_sharding(program.sharding(part.operand), part.kind, part.args)
            sharding = program.shardings(node)[part.index]
            assert sharding is not None, node
            shape = program.global_type(node, part.index).shape
            is_same = result == sharding or has_same_shards(result, sharding, shape)
            assert is_same, f"{node} = {part.kind}{node.args}: {sharding}, but it makes {result}"


def _op_agrees(program: Program, node: fx.Node) -> None:
    """An op agrees with its rule."""
    if node.op == "placeholder" or is_getitem(node) or node.target in (reshard, *CODINGS) or members(node):
        return
    values = program.operand_values(node)
    operands = tuple([None if value is None else program.shardings(value[0])[value[1]] for value in values])
    results = program.shardings(node)
    if is_annotation(node):
        assert operands == results, f"{node}: {results[0]}"
        return
    if node.target in DOT_RINGS:
        _check_ring(program, node, operands, results)
        return
    rule = program.rule(node)
    if (_op_agrees, operands, results) not in rule.known:
        made = tuple((node, i) for i in range(len(results)))
        _check_rule(program, node, rule, (*values, *made), operands, results)
        rule.known[_op_agrees, operands, results] = True


Shardings = tuple[Sharding | None, ...]
Open = set[tuple[AxisPart, ReduceOp]]


def _check_ring(program: Program, node: fx.Node, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Each product agrees with a dot of the gathered operand, or with a dot whose sum is open until it is scattered."""
    args: Any = node.args
    values: Sequence[Any] = program.operand_values(node)
    (_, axes, dim, specs, *_), types = args, program.types(node)
    if node.target is gather_dots:
        gathered = steps_sharding(operands[0], "all_gather", (axes, dim))
        made = list(enumerate(results))[-len(specs) :]
        assert made[0][0] == 0 or results[0] == gathered, f"{node}: {results[0]}, but {gathered} is gathered"
        operands = gathered, *operands[1:]
        pairs = [(0, i) for i in range(1, len(values))]
    else:
        whole = steps_sharding(results[0], "all_gather", (axes, dim))
        open_ = replace(whole, partial=tuple((part, "sum") for part in parse_parts(axes, whole.mesh)))
        made = [(0, open_)] * len(specs)
        pairs = [(i, i + 1) for i in range(0, len(values), 2)]
    for spec, pair, (i, result) in zip(specs, pairs, made, strict=True):
        read, cuts = (tuple(each[j] for j in pair) for each in (values, operands))
        call = OpCall((), {}, tuple(map(program.value_type, read)), (types[i],))
        _check_rule(program, node, make_rule(spec, call, linear="0 1"), (*read, (node, i)), cuts, (result,))


def _check_rule(
    program: Program, node: fx.Node, rule: Rule, values: Sequence[Value | None], operands: Shardings, results: Shardings
) -> None:
    """Each factor is cut alike on all tensors, and the rule allows that cut.

    The open sums of a result are those of the operands and those that cut factors leave.
    """
    cuts: dict[str, DimSharding] = {}
    for value, dims, sharding in zip(values, rule.operands + rule.results, operands + results, strict=True):
        if value is None or sharding is None:
            continue
        if dims is None:
            assert value[0] is node or sharding.is_replicated, f"{node}: {value[0]} must be whole on every rank"
            continue
        shape = program.value_type(value).shape
        found = factor_cuts(dims, sharding.dims, shape, rule.sizes)
        assert dims_sharding(dims, found, rule.sizes) == sharding.dims, f"{node}: {sharding} of {shape} on {dims}"
        for factor in (factor for factors in dims for factor in factors):
            cut = cuts.setdefault(factor, found.get(factor, WHOLE))
            assert cut == found.get(factor, WHOLE), f"{node}: factor {factor} is cut otherwise in {value[0]} {sharding}"
            is_one = rule.sizes[factor] == 1 and factor not in rule.whole
            assert cut == WHOLE or is_one or rule.may_cut(factor, cut), f"{node}: factor {factor} must be whole"
    passing = _passing(node, rule, operands)
    for i, sharding in enumerate(results):
        if sharding is not None and rule.results[i] is not None:
            partial = [factor for factor in cuts if rule.is_partial(factor, i)]
            reduced = {(part, rule.reduce) for factor in partial for part in cuts[factor].all_axes}
            expected, found_open = set(open_reductions(passing | reduced)), set(sharding.partial)
            assert found_open == expected, f"{node}: open is {_open_text(found_open)}, not {_open_text(expected)}"


def _passing(node: fx.Node, rule: Rule, operands: Shardings) -> Open:
    """The open sums of the operands, alike in one group that the op is linear in; empty if none is open."""
    partials = {i: sharding.partial for i, sharding in enumerate(operands) if sharding is not None and sharding.partial}
    if not partials:
        return set()
    assert frozenset(partials) in rule.linear, f"{node}: operands {sorted(partials)} are partial"
    first, *others = (set(partial) for partial in partials.values())
    for other in others:
        assert other == first, f"{node}: open is {_open_text(first)} in one operand, {_open_text(other)} in another"
    assert all(op == "sum" for _, op in first), f"{node}: open is {_open_text(first)}, and only a sum passes"
    return first


def _open_text(open_: Open) -> str:
    """``sum tp, max dp``, or ``nothing``."""
    return ", ".join(f"{op} {part.name}" for part, op in sorted(open_)) or "nothing"


def _check_pins(program: Program) -> None:
    """Values have the shardings that the user annotated; an annotation in the model is gone once localized."""
    values: dict[tuple[str, str], fx.Node | None] = {("value", node.name): node for node in program.calls}
    for output, result in zip(program.outputs, program.results, strict=True):
        values[output.kind, output.name] = result
    values |= program.named_inputs
    for pin in program.pins:
        node = values.get((pin.kind, pin.name))
        if node is not None:
            sharding = program.sharding(node)
            if pin.kind == "parameter":  # it may be stored in a sharding other than the one it is computed in
                sharding = program.computed.get(pin.name, sharding)
            dims = enumerate(zip(pin.sharding.dims, sharding.dims, strict=True))
            moved = [
                dim
                for dim, (pinned, cut) in dims  # no annotation names microbatches
                if pinned not in (cut, cut.without((MICROBATCH,))) and not (dim in pin.open and extends(cut, pinned))
            ]
            assert not moved, f"{pin.text}: {node} is {program.sharding(node)} in dims {moved}"


def _check_localized(program: Program) -> None:
    """Each op, run on the local shapes of its operands, gives the local shapes of its results.

    Dtypes and empty results are not compared, as kernels of one op differ there between devices.
    """
    for node in program.calls:
        if members(node) or node.target in EXCHANGES:
            continue
        for device in ("meta", "cpu"):  # a few kernels differ
            types = program.infer(node.target, node.args, node.kwargs, device)
            inferred: tuple[TensorType | None, ...] = types if isinstance(types, tuple) else (types,)
            wrong = [
                (type_, result)
                for type_, result in zip(program.types(node), inferred, strict=True)
                if type_ and result and type_.shape != result.shape and 0 not in type_.shape + result.shape
            ]
            if not wrong:
                break
        assert not wrong, f"{node} = {node.target}: local type {wrong[0][0]}, but it makes {wrong[0][1]}"


CHECKS: dict[Level, Callable[[Program], None]] = {
    "annotated": _check_pins,
    "agreed": _check_results,
    "lowered": _check_lowered,
    "localized": _check_localized,
}
CAPTURED: tuple[Check, ...] = (_is_typed_and_pure,)
ANNOTATED = (*CAPTURED, _is_annotated)
AGREED = (*ANNOTATED, _op_agrees)
NODE_CHECKS: dict[Level, tuple[Check, ...]] = {
    "captured": CAPTURED, "canonical": CAPTURED, "annotated": ANNOTATED,
    "agreed": AGREED, "lowered": AGREED, "localized": ANNOTATED,  # rules hold for global types
}  # fmt: skip
