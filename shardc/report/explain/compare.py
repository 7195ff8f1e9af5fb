"""Bytes that a rank sends by each way to cut an op, to reshard a value, and to decompose an op or gather its operand.

The costs are those of the passes that choose: choose_cuts, plan_reshard and decompose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from torch import fx

from shardc.language.cut import factor_cuts
from shardc.language.mesh import Axes
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div
from shardc.passes.decompose.decompose import (
    DECOMPOSITIONS,
    WINDOWED,
    apart_bytes,
    arriving,
    cut_whole,
    gathered_bytes,
    is_scattered,
    is_stored,
    num_others,
    windows_of,
)
from shardc.passes.emitter import NEVER
from shardc.passes.reshard.choose_cuts import CutPlan, Cuts, choices, num_pieces
from shardc.passes.reshard.move_axes import Move, Space, State, moves_from
from shardc.passes.reshard.plan_reshard import collectives_of_steps, plan_reshard, search_space, steps_of
from shardc.program.collective import Step
from shardc.program.program import Program


@dataclass(frozen=True, slots=True)
class OpWay:
    """A way to compute an op: ``text`` says how it is cut over the axes.

    ``wire_bytes``: what a rank sends to reshard its operands and results. ``work``: how many times as much a rank
    computes as in the chosen way. ``is_considered``: an operand or a result is cut so, which is a condition for the
    compiler to consider the way.
    """

    text: str
    wire_bytes: int
    work: float
    is_chosen: bool
    is_considered: bool = True


def compare_cuts(plan: CutPlan, node: fx.Node, axes: Axes) -> tuple[OpWay, ...]:
    """The chosen way to compute an op of the plan's program, and the others over these axes, the cheapest first."""
    rule, names = plan.program.rule(node), {part.name for part in axes}
    chosen = _chosen(plan, node, rule)
    rest = {factor: cut.without(names) for factor, cut in chosen.items()}
    rest = {factor: cut for factor, cut in rest.items() if cut != WHOLE}
    now = next((factor for factor, cut in chosen.items() if {part.name for part in cut.all_axes} >= names), "")
    ways: dict[str, Cuts] = {}  # the axes cut each factor in turn that they may cut, and then none
    for factor, before in ((factor, rest.get(factor, WHOLE)) for factor in rule.sizes):
        cut = DimSharding(before.axes + axes)
        if not before.minor and rule.may_cut(factor, cut):
            ways[factor] = {**rest, factor: cut}
    ways[""] = rest
    ways.pop(now, None)
    considered = choices(rule, plan.arrivals.claims(node))
    others = []
    for factor, cuts in ways.items():
        cost = plan.arrivals.cost(node, plan.arrivals.op_shardings(node, cuts))
        work = num_pieces(chosen) / num_pieces(cuts)
        others.append(OpWay(_text(rule, factor, axes), cost, work, False, cuts in considered))
    way = OpWay(_text(rule, now, axes), plan.arrivals.cost(node, plan.ops[node]), 1.0, True)
    return (way, *sorted(others, key=lambda way: (way.wire_bytes, way.work)))


def op_of_partial_sum(plan: CutPlan, node: fx.Node, axes: Axes) -> fx.Node:
    """The op that left a sum open which passed through ``node``."""
    names = {part.name for part in axes}
    while True:
        operands = zip(plan.program.operand_values(node), plan.ops[node].operands, strict=True)
        partial = ((value, {part.name for part in src.partial_axes}) for value, src in operands if value and src)
        behind = next((value[0] for value, open_axes in partial if names & open_axes), None)
        if behind is None:
            return node
        node = behind


def _chosen(plan: CutPlan, node: fx.Node, rule: Rule) -> Cuts:
    """The cuts of the factors of an op in a plan."""
    program, cuts = plan.program, Cuts()
    values = [(node, i) for i in range(len(rule.results))]
    operands = zip(rule.operands, plan.ops[node].operands, program.operand_values(node), strict=True)
    results = zip(rule.results, plan.ops[node].results, values, strict=True)
    for dims, sharding, value in (*operands, *results):
        if dims is not None and sharding is not None and value is not None:
            cuts |= factor_cuts(dims, sharding.dims, program.value_type(value).shape, rule.sizes)
    return cuts


def _text(rule: Rule, factor: str, axes: Axes) -> str:
    """The cut of a factor in words, by a dim of the result or of an operand."""
    over = " and ".join(dict.fromkeys(part.name for part in axes))
    for dims in rule.results:
        for dim, factors in enumerate(dims or ()):
            if factor in factors:
                return f"cut over {over} along dim {dim} of the result"
    for i, dims in enumerate(rule.operands):
        for dim, factors in enumerate(dims or ()):
            if factor in factors:
                return f"cut over {over} along what is summed, dim {dim} of operand {i}"
    return f"not cut over {over}"


MOST = 3  # steps of a sequence
Steps = tuple[Step, ...]


class _UnboundedSpace(Space):
    """A search space without a bound on the size of a local value."""

    @cached_property
    def bound(self) -> int:
        """The whole value."""
        return self.scale


@lru_cache(maxsize=1024)
def compare_steps(src: Sharding, dst: Sharding, type: TensorType) -> tuple[Steps, ...]:
    """The steps that ``plan_reshard`` chooses, and then other sequences, those that send fewer bytes first."""
    chosen = plan_reshard(src, dst, type)
    if not chosen or any(cut.minor for cut in src.dims + dst.dims):
        return (chosen,)
    best: dict[tuple[str, ...], Steps] = {}
    plain, atoms, active, _ = search_space(src, dst, type.shape, is_wide=True)
    space = _UnboundedSpace(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    for moves in _ways(space, space.src, ()):
        steps = tuple(steps_of(moves, space, atoms, active, src, type.shape))
        kinds = kinds_of(steps)
        if kinds not in best or bytes_sent(src, steps, type) < bytes_sent(src, best[kinds], type):
            best[kinds] = steps
    best.pop(kinds_of(chosen), None)
    sequences = [chosen]
    for steps in sorted(best.values(), key=lambda steps: (bytes_sent(src, steps, type), len(steps))):
        counts = Counter(kinds_of(steps))  # left out where another sequence needs only some of these
        if not any(Counter(kinds_of(other)) < counts for other in [*sequences, *best.values()] if other is not steps):
            sequences.append(steps)
    return tuple(sequences)


def kinds_of(steps: Steps) -> tuple[str, ...]:
    """The kinds of the steps in order, without views."""
    return tuple(step.kind for step in steps if step.kind != "view")


def bytes_sent(src: Sharding, steps: Steps, type: TensorType) -> int:
    """Bytes that one rank sends in the steps of a reshard."""
    return sum(each.wire_bytes for each in collectives_of_steps(src, steps, type))


def bytes_held(src: Sharding, steps: Steps, type: TensorType) -> int:
    """The most bytes of the value that one rank holds at a time, before, between or after the steps of a reshard."""
    local = [src.local_shape(type.shape), *(step.sharding.local_shape(step.shape) for step in steps)]
    return max(map(math.prod, local)) * type.dtype.itemsize


def _ways(space: Space, state: State, before: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """The ways from a state to the target that visit no state twice."""
    if state == space.dst:
        yield before
    elif len(before) < MOST:
        known = {move.before for move in before}
        for move, _ in moves_from(space, state):
            if move.after not in known:
                yield from _ways(space, move.after, (*before, move))


@dataclass(frozen=True, slots=True)
class FormCosts:
    """Bytes that a rank sends over ``axes`` if an op is decomposed (``apart``), and if its operand is gathered.

    ``refused``: why the compiler does not consider decomposing it.
    """

    axes: frozenset[str]
    apart: int
    gathered: int
    refused: str = ""


def compare_forms(program: Program, node: fx.Node) -> FormCosts | None:
    """The costs of both ways for an op; None for an op that is never decomposed."""
    rule = program.rule(node)
    if node.target not in DECOMPOSITIONS and node.target not in WINDOWED:
        return None
    cuts = arriving(program, node, rule)
    whole = cut_whole(rule, cuts) if node.target in DECOMPOSITIONS else set()
    if whole and DECOMPOSITIONS[node.target].moved(program, node, whole) < NEVER:  # into local work and a sum
        count = num_pieces({factor: cuts[factor] for factor in whole})
        apart, gathered = apart_bytes(program, node, cuts, whole), gathered_bytes(program, node, rule, whole, cuts)
        refused = "not asked: positions do not follow one another" if is_scattered(node, cuts, whole) else ""
        if any(is_stored(program, node, cuts[factor]) for factor in whole):
            refused = "not asked: a table that is cut as inputs are is stored so, and gathered"
        axes = frozenset(part.name for factor in whole for part in cuts[factor].all_axes)
        return FormCosts(axes, apart * (count - 1) // count, gathered * (count - 1) // count, refused)
    windows = windows_of(program, node, rule) if node.target in WINDOWED else iter(())
    for factor, along, moved in windows:  # reads edges of neighbours; all ranks together send ``moved`` bytes
        gathered = gathered_bytes(program, node, rule, {factor}, cuts) * (along.count - 1) // along.count
        apart = ceil_div(moved, along.count * num_others(cuts, {factor}))
        return FormCosts(frozenset(part.name for part in cuts[factor].all_axes), apart, gathered)
    return None
