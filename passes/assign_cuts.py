"""Which axes cut which factor of one op: one axis cuts one factor on all its tensors, and several may claim it.

Of those that claim it the one whose annotation comes first wins, then the one of more bytes (``assign``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.cut import extends, factor_cuts
from shardc.fact import Origin
from shardc.mesh import Axes, AxisPart
from shardc.node import is_annotation
from shardc.program import Program, Value
from shardc.rule import Dims, Rule
from shardc.sharding import WHOLE, DimSharding, ReduceOp, Sharding, ceil_div, num_shards

Partial = tuple[tuple[AxisPart, ReduceOp], ...]
Cuts = dict[str, DimSharding]
FIRST = 2**63  # more bytes than anything has


@dataclass(frozen=True, slots=True)
class Claim:
    """A cut that a factor should have: because a tensor of ``nbytes`` lies so, of an origin of ``rank``.

    ``is_wish``: it is a result.
    """

    factor: str
    cut: DimSharding
    rank: int
    nbytes: int
    is_wish: bool


def claims_on(program: Program, node: fx.Node, rule: Rule, lies: Callable[[Value], Sharding]) -> list[Claim]:
    """What operands claim as they lie, and results as propagate wished; a result that the user placed, alone."""
    is_placed = is_annotation(node)
    claims: list[Claim] = []
    for value, dims in zip(program.operand_values(node), rule.operands, strict=True):
        if value is not None and dims is not None and not is_placed:
            claims += _claims_of(program, rule, value, dims, lies(value))
    for index, (dims, sharding) in enumerate(zip(rule.results, program.shardings(node), strict=True)):
        if dims is not None and sharding is not None:
            claims += _claims_of(program, rule, (node, index), dims, sharding, is_wish=True)
    return claims


def _claims_of(
    program: Program, rule: Rule, value: Value, dims: Dims, sharding: Sharding, is_wish: bool = False
) -> list[Claim]:
    type_ = program.value_type(value)
    cuts = factor_cuts(dims, sharding.dims, type_.shape, rule.sizes)
    if not cuts:
        return []
    nbytes = ceil_div(type_.nbytes, num_shards(sharding.cut_axes))
    origins = program.origins(value[0])[value[1]]
    return [Claim(factor, cut, _rank(cut.all_axes, origins), nbytes, is_wish) for factor, cut in cuts.items()]


def assign(rule: Rule, claims: list[Claim], taken: Axes = ()) -> Cuts:
    """Which axes cut which factor, when an axis may cut one factor only.

    The claim with the lowest rank wins, then the one of more bytes, then the earlier factor; a claim that lost an axis
    keeps the axes before it. ``taken`` axes cut nothing, since a partial sum over them passes through.
    """
    if not claims:
        return {}
    order = {factor: i for i, factor in enumerate(rule.sizes)}
    cuts: Cuts = {}
    for claim in sorted(claims, key=lambda claim: (claim.rank, -claim.nbytes, order[claim.factor])):
        have = cuts.get(claim.factor, WHOLE)
        if rule.may_cut(claim.factor, claim.cut) and extends(claim.cut, have):
            used = [*taken, *(part for factor, cut in cuts.items() if factor != claim.factor for part in cut.all_axes)]
            granted = _unused(claim.cut, used)
            if granted != WHOLE and rule.may_cut(claim.factor, granted) and extends(granted, have):
                cuts[claim.factor] = granted
    return cuts


def choices(rule: Rule, claims: list[Claim], passing: Partial) -> list[Cuts]:
    """The cuts by the claims' own order, and those where another claim of its rank comes first."""
    taken = tuple(part for part, _ in passing)
    found = [assign(rule, claims, taken)]
    for i, claim in enumerate(claims):
        if found[0].get(claim.factor, WHOLE) != claim.cut and rule.may_cut(claim.factor, claim.cut):
            cuts = assign(rule, [*claims[:i], replace(claim, nbytes=FIRST), *claims[i + 1 :]], taken)
            found += [cuts] * (cuts not in found and num_pieces(cuts) >= num_pieces(found[0]))
    return found


def num_pieces(cuts: Cuts) -> int:
    """Into how many pieces the work is cut."""
    return math.prod(num_shards(cut.all_axes) for cut in cuts.values())


def _unused(cut: DimSharding, used: list[AxisPart]) -> DimSharding:
    """The leading part of a cut whose axes are not used."""
    free = [not any(part.overlaps(other) for other in used) for part in cut.all_axes]
    if all(free):
        return cut
    return WHOLE if cut.minor else DimSharding(cut.axes[: free.index(False)])


def _rank(axes: Axes, origins: Mapping[str, Origin]) -> int:
    return min((origins[part.name].rank for part in axes if part.name in origins), default=1)
