"""What cuts flow through: each op of a program by its rule, and ties of two values that must lie alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardc.ends import ends_of
from shardc.ops.contraction import dot
from shardc.program import Program, Value
from shardc.rule import Dims, Rule


@dataclass(frozen=True, slots=True)
class Op:
    """A rule over values: an op of the graph, or a tie. ``values``, and their ``dims``: operands, then results."""

    name: str
    rule: Rule
    values: tuple[Value | None, ...]
    dims: tuple[Dims | None, ...]
    is_contraction: bool = False


def ops_of(program: Program) -> Iterator[Op]:
    """Those of the graph."""
    for node in program.calls:
        rule = program.rule(node)
        made = tuple(None if type_ is None else (node, i) for i, type_ in enumerate(program.types(node)))
        values = program.operand_values(node) + made
        yield Op(node.name, rule, values, rule.operands + rule.results, node.target is dot)


def ties_of(program: Program) -> Iterator[Op]:
    """Gradients and new buffer values lie as what they belong to; a tangent lies as its output."""
    inputs = program.named_inputs
    for output, owner, node in ends_of(program):
        partner = inputs.get(("tangent", output.name)) if output.kind == "output" else owner
        if node is not None and partner is not None:
            yield _tie(program, f"the {output.kind} {output.name}", program.value(node), program.value(partner))


def _tie(program: Program, name: str, one: Value, other: Value) -> Op:
    sizes = {f"d{i}": size for i, size in enumerate(program.value_type(one).shape)}
    dims = tuple((name,) for name in sizes)
    return Op(name, Rule((dims,), (dims,), sizes), (one, other), (dims, dims))
