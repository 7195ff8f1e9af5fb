"""verify: what must hold of a program at each level, checked after every pass.

A failure is a fault of the compiler, never of the user, so it is an AssertionError that names the node.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from shardc.collective import COLLECTIVES, reshard
from shardc.mesh import AxisPart
from shardc.node import is_getitem
from shardc.program import LEVELS, Level, Program, Value
from shardc.rule import Dims, Rule, dims_sharding, factor_cuts
from shardc.sharding import WHOLE, DimSharding, Sharding, TensorType

from .keep_dims import SPECS


def verify(program: Program) -> None:
    """Check every invariant of the program's level, and those of the levels before that still hold."""
    program.graph.lint()
    reached = LEVELS.index(program.level)
    for level, checks in CHECKS.items():
        if LEVELS.index(level) <= reached:
            for check in checks:
                check(program)


def _ends_are_described(program: Program) -> None:
    assert len(program.placeholders) == len(program.inputs), (len(program.placeholders), len(program.inputs))
    assert len(program.results) == len(program.outputs), (len(program.results), len(program.outputs))


def _values_have_types(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op != "output":
            assert node.op in ("placeholder", "call_function"), f"{node.op} {node}"
            assert program.has_many(node) or program.types(node)[0] is not None, f"{node} has no type"


def _ops_are_pure(program: Program) -> None:
    for node in program.calls:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, f"{node} = {node.target} changes its operand"


def _contractions_are_dots(program: Program) -> None:
    for node in program.calls:
        assert node.target not in SPECS, f"{node} = {node.target} should be a dot"


def _values_have_shardings(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        shardings = program.shardings(node)
        assert len(shardings) == len(program.types(node)), f"{node} has no sharding"
        for type_, sharding in zip(program.types(node), shardings, strict=True):
            assert (type_ is None) == (sharding is None), f"{node}: {type_} with {sharding}"
            if type_ is not None and sharding is not None:
                assert len(sharding.dims) == len(type_.shape), f"{node}: {sharding} on {type_}"
                assert program.level == "localized" or sharding.is_even(type_.shape), f"{node}: {sharding.text(type_)}"


def _ops_agree(program: Program) -> None:
    """Every tensor of an op is cut alike along each factor, and what was not summed is partial."""
    if program.level == "localized":
        return
    for node in program.calls:
        if node.target is not reshard and node.target not in COLLECTIVES:
            _op_agrees(program, node)


def _op_agrees(program: Program, node: fx.Node) -> None:
    rule = program.rule(node)
    cuts: dict[str, DimSharding] = {}
    for value, dims in [*_taken(program, node, rule), *_made(program, node, rule)]:
        sharding, shape = _sharding(program, value), program.value_type(value).shape
        found = factor_cuts(dims, sharding, shape, rule.sizes)
        assert dims_sharding(dims, found, rule.sizes) == sharding.dims, f"{node}: {sharding} of {shape} on {dims}"
        for factor in (factor for factors in dims for factor in factors):
            cut = cuts.setdefault(factor, found.get(factor, WHOLE))
            assert cut == found.get(factor, WHOLE), f"{node}: factor {factor} is cut by {cut} and {found.get(factor)}"
            assert cut == WHOLE or factor not in rule.whole, f"{node}: factor {factor} must be whole"
    passing = _passing(program, node, rule)
    for value, _ in _made(program, node, rule):
        unsummed = {part for factor, cut in cuts.items() if rule.is_partial(factor, value[1]) for part in cut.all_axes}
        found_open = set(_sharding(program, value).partial_axes)
        assert found_open == unsummed | passing, f"{node}: partial over {found_open}, not {unsummed | passing}"


Tensors = list[tuple[Value, Dims]]


def _taken(program: Program, node: fx.Node, rule: Rule) -> Tensors:
    values = program.operand_values(node)
    return [(value, dims) for value, dims in zip(values, rule.operands, strict=True) if value and dims is not None]


def _made(program: Program, node: fx.Node, rule: Rule) -> Tensors:
    return [((node, i), dims) for i, dims in enumerate(rule.results) if dims is not None]


def _sharding(program: Program, value: Value) -> Sharding:
    sharding = program.shardings(value[0])[value[1]]
    assert sharding is not None, value
    return sharding


def _passing(program: Program, node: fx.Node, rule: Rule) -> set[AxisPart]:
    """The axes over which operands are open: one group that the op is linear in, alike, or none."""
    partials = {
        i: _sharding(program, value).partial
        for i, value in enumerate(program.operand_values(node))
        if value is not None and _sharding(program, value).partial
    }
    if not partials:
        return set()
    assert frozenset(partials) in rule.linear, f"{node}: operands {sorted(partials)} are partial"
    assert len(set(partials.values())) == 1, f"{node}: operands are partial in different ways: {partials}"
    return {part for part, _ in next(iter(partials.values()))}


def _outputs_are_whole_sums(program: Program) -> None:
    for output, node in zip(program.outputs, program.results, strict=True):
        assert node is None or not program.sharding(node).partial, f"output {output.name} is a partial sum"


def _no_reshards(program: Program) -> None:
    for node in program.calls:
        assert node.target is not reshard, f"{node} is not lowered"


def _types_are_local(program: Program) -> None:
    """Each op, run on the local types of its operands, gives the local types of its results."""
    if program.level != "localized":
        return
    for node in program.calls:
        if node.target in COLLECTIVES:
            continue
        found = program.infer(node.target, node.args, node.kwargs)
        inferred: tuple[TensorType | None, ...] = found if isinstance(found, tuple) else (found,)
        for said, got in zip(program.types(node), inferred, strict=True):
            assert said is None or said == got, f"{node} = {node.target}: local type {said}, but it makes {got}"


CHECKS: dict[Level, tuple[Callable[[Program], None], ...]] = {
    "captured": (_ends_are_described, _values_have_types, _ops_are_pure),
    "annotated": (_contractions_are_dots, _values_have_shardings),
    "agreed": (_ops_agree, _outputs_are_whole_sums),
    "lowered": (_no_reshards,),
    "localized": (_types_are_local,),
}
