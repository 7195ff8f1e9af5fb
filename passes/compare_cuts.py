"""In what other ways an op could be computed over some axes, beside the one that was chosen, and what that would send.

One axis cuts one factor of an op, or none: each is asked of the same plan, by the same cost, as in choose_cuts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.cut import factor_cuts
from shardc.mesh import Axes
from shardc.rule import Rule
from shardc.sharding import WHOLE, DimSharding

from .assign_cuts import Cuts, choices, claims_on, num_pieces
from .choose_cuts import Plan


@dataclass(frozen=True, slots=True)
class OpWay:
    """A way to compute an op: ``text`` says how it is cut over the axes.

    ``wire_bytes``: what a rank sends to bring the operands there, and the results to where they are wished. ``work``:
    how many times what the chosen way has a rank compute. ``is_considered``: something that the op takes or makes lies
    so; the compiler asks of no other way.
    """

    text: str
    wire_bytes: int
    work: float
    is_chosen: bool
    is_considered: bool = True


def compare_cuts(plan: Plan, node: fx.Node, axes: Axes) -> tuple[OpWay, ...]:
    """The chosen way to compute an op of the plan's program, and the others over these axes, the cheapest first."""
    rule, names = plan.program.rule(node), {part.name for part in axes}
    chosen = _chosen(plan, node, rule)
    rest = {factor: cut.without(names) for factor, cut in chosen.items()}
    rest = {factor: cut for factor, cut in rest.items() if cut != WHOLE}
    now = next((factor for factor, cut in chosen.items() if {part.name for part in cut.all_axes} >= names), "")
    cost = plan.cost(node, (plan.wanted[node], plan.made[node]))
    found = [OpWay(_text(rule, now, axes), cost, 1.0, True)]
    asked = choices(rule, claims_on(plan.program, node, rule, plan.seen_by(node)), ())
    others = []
    for factor, cuts in _others(rule, rest, axes):
        if factor != now:
            cost = plan.cost(node, plan.way(node, rule, cuts, frozenset(), ()))
            work = num_pieces(chosen) / num_pieces(cuts)
            others.append(OpWay(_text(rule, factor, axes), cost, work, False, cuts in asked))
    return (*found, *sorted(others, key=lambda way: (way.wire_bytes, way.work)))


def where_summed(plan: Plan, node: fx.Node, axes: Axes) -> fx.Node:
    """Of an op that an open sum came through, the op that left it open."""
    names = {part.name for part in axes}
    while True:
        operands = zip(plan.program.operand_values(node), plan.wanted[node], strict=True)
        behind = [
            value[0] for value, lies in operands if value and lies and names & {p.name for p in lies.partial_axes}
        ]
        if not behind:
            return node
        node = behind[0]


def _chosen(plan: Plan, node: fx.Node, rule: Rule) -> Cuts:
    """How the factors of an op are cut in a plan."""
    program, found = plan.program, Cuts()
    operands = zip(rule.operands, plan.wanted[node], program.operand_values(node), strict=True)
    results = (
        (dims, made, (node, i)) for i, (dims, made) in enumerate(zip(rule.results, plan.made[node], strict=True))
    )
    for dims, sharding, value in (*operands, *results):
        if dims is not None and sharding is not None and value is not None:
            found |= factor_cuts(dims, sharding.dims, program.value_type(value).shape, rule.sizes)
    return found


def _others(rule: Rule, rest: Cuts, axes: Axes) -> Iterator[tuple[str, Cuts]]:
    """The axes cutting each factor that they may, and then none."""
    for factor in rule.sizes:
        before = rest.get(factor, WHOLE)
        cut = DimSharding(before.axes + axes)
        if not before.minor and rule.may_cut(factor, cut):
            yield factor, {**rest, factor: cut}
    yield "", rest


def _text(rule: Rule, factor: str, axes: Axes) -> str:
    """How an op is cut, by dims of its result."""
    over = " and ".join(dict.fromkeys(part.name for part in axes))
    for dims in rule.results:
        for dim, factors in enumerate(dims or ()):
            if factor in factors:
                return f"cut over {over} along dim {dim} of the result"
    places = (
        (i, dim) for i, dims in enumerate(rule.operands) for dim, factors in enumerate(dims or ()) if factor in factors
    )
    for i, dim in places:
        return f"cut over {over} along what is summed, dim {dim} of operand {i}"
    return f"not cut over {over}"
