"""How the factors of each op are cut, and which partial sums ride on: decided for a program before any rewrite.

Of the ways to cut an op's factors (assign_cuts.py) the one that moves the fewest bytes is taken. A partial sum rides
through ops that are linear in it, for as long as it has one user and nothing makes it larger: all are let ride, those
that meet an op they cannot pass are reduced where they are made, and so on until all that ride can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from shardc.capture.precision import reduced_casts
from shardc.language.cut import dims_sharding, extends, factor_cuts
from shardc.language.mesh import Axes, AxisPart
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, ReduceOp, Sharding, TensorType, ceil_div, num_shards
from shardc.program.node import is_annotation, is_cast
from shardc.program.program import Program, Value, ends_of
from shardc.program.provenance import Origin

from .plan_reshard import reshard_plan

Way = tuple[tuple[Sharding | None, ...], tuple[Sharding | None, ...]]  # of operands and of results
Seen = Mapping[tuple[fx.Node, Value], Sharding]  # how an op is to think that an operand lies


def choose_cuts(program: Program, seen: Seen | None = None) -> Plan:
    """Let every partial sum with one user ride, then reduce at once those that meet an op they cannot pass."""
    delayed = {value for node in program.calls for value in _values_used_once(program, node)}
    while True:
        plan = Plan(program, delayed, seen or {})
        plan.run()
        if not plan.broken:
            return plan
        delayed = delayed - plan.broken


def move_bytes(have: Sharding, want: Sharding, type: TensorType) -> int:
    """What a rank sends to bring a value from one sharding to another."""
    found = () if have == want else reshard_plan(have.mesh, type.shape, type.dtype, have, want)
    return sum(each.wire_bytes for each in found)


@dataclass(slots=True)
class Plan:
    """What was decided: for each op the shardings its operands must have and its results have.

    ``delayed``: values whose partial sum rides on; every other partial value is reduced where it is made. ``seen``: an
    op that is to be cut in another way than what it takes claims its cuts as if that lay so.
    """

    program: Program
    delayed: set[Value]
    seen: Seen
    wanted: dict[fx.Node, tuple[Sharding | None, ...]] = field(default_factory=dict)
    made: dict[fx.Node, tuple[Sharding | None, ...]] = field(default_factory=dict)
    wished: dict[fx.Node, tuple[Sharding | None, ...]] = field(default_factory=dict)
    lies: dict[Value, Sharding] = field(default_factory=dict)
    broken: set[Value] = field(default_factory=set)
    reduced: set[fx.Node] = field(init=False)  # casts of gradients to the dtype that they are reduced in

    def __post_init__(self) -> None:
        self.reduced = reduced_casts(self.program)

    def run(self) -> None:
        """Go through the program once, forward."""
        for node in self.program.placeholders:
            self.wished[node] = self.program.shardings(node)
            self.lies[node, 0] = self.program.sharding(node)
        for node in self.program.calls:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        rule = self.program.rule(node)
        self.wished[node] = self.program.shardings(node)
        given = self.program.operand_values(node)
        claims = claims_on(self.program, node, rule, self.seen_by(node))
        riders = self._riders(node, rule, given, claims)
        self.broken |= {
            value for i, value in enumerate(given) if value and self.lies[value].partial and i not in riders
        }
        passing = next((self.lies[value].partial for i, value in enumerate(given) if value and i in riders), ())
        ways = [self.way(node, rule, cuts, riders, passing) for cuts in choices(rule, claims, passing)]
        if is_annotation(node):
            ways = [(self.wished[node], self.wished[node])]  # as the user said, though it be a cut of one element
        self.wanted[node], self.made[node] = ways[0] if len(ways) == 1 else min(ways, key=partial(self.cost, node))
        for index, made in enumerate(self.made[node]):
            if made is not None:
                self.lies[node, index] = made if (node, index) in self.delayed else self._settled((node, index), made)

    def seen_by(self, node: fx.Node) -> Callable[[Value], Sharding]:
        """How an op's operands lie as it sees them."""
        return lambda value: self.seen.get((node, value)) or self.lies[value]

    def way(self, node: fx.Node, rule: Rule, cuts: Cuts, riders: frozenset[int], passing: Partial) -> Way:
        """What operands and results must be when the factors are cut so."""
        given = self.program.operand_values(node)
        wanted = tuple(
            None if value is None else self._operand_sharding(rule, dims, cuts, value, passing if i in riders else ())
            for i, (value, dims) in enumerate(zip(given, rule.operands, strict=True))
        )
        made = tuple(
            None if type_ is None else self._result_sharding(node, rule, index, type_, cuts, passing)
            for index, type_ in enumerate(self.program.types(node))
        )
        return wanted, made

    def cost(self, node: fx.Node, way: Way) -> int:
        """Bytes that bring the operands there, and the results to where they are wished."""
        wanted, made = way
        moves = [
            (self.lies[value], want, self.program.value_type(value))
            for value, want in zip(self.program.operand_values(node), wanted, strict=True)
            if value is not None and want is not None
        ]
        moves += [
            (have, wish, self.program.value_type((node, index)))
            for index, (have, wish) in enumerate(zip(made, self.wished[node], strict=True))
            if have is not None and wish is not None
        ]
        return sum(move_bytes(*move) for move in moves)

    @property
    def wire_bytes(self) -> int:
        """What a rank sends for all reshards, a value being brought to each sharding once."""
        taken = [(node, self.program.operand_values(node), self.wanted[node]) for node in self.program.calls]
        moves = {(value, want) for _, *both in taken for value, want in zip(*both, strict=True) if value and want}
        ends = zip(self.program.results, self.returned(), strict=True)
        moves |= {(self.program.value(result), want) for result, want in ends if result is not None and want}
        reduced = [
            move_bytes(have, self.lies[node, index], self.program.value_type((node, index)))
            for node, made in self.made.items()
            for index, have in enumerate(made)
            if have is not None
        ]
        return sum(reduced) + sum(
            move_bytes(self.lies[value], want, self.program.value_type(value)) for value, want in moves
        )

    def returned(self) -> list[Sharding | None]:
        """How each result is to lie: a gradient or a buffer as what it belongs to, an output as the user said.

        One that the user did not place lies as it came to lie. None where there is no result.
        """
        program = self.program
        placed = {("output", pin.name) for pin in program.pins if pin.kind == "output"}
        found: list[Sharding | None] = []
        for output, owner, result in ends_of(program):
            if owner is not None or result is None:
                found.append(None if owner is None else program.sharding(owner))
                continue
            producer, index = program.value(result)
            lies, wished = self.lies[producer, index], self.wished[producer][index]
            found.append(wished if (output.kind, output.name) in placed or lies.partial else lies)
        return found

    def _riders(self, node: fx.Node, rule: Rule, given: Sequence[Value | None], claims: list[Claim]) -> frozenset[int]:
        """The operands whose open sum may pass through the op: a whole linear group, open over the same axes alone."""
        if not any(self.lies[value].partial for value in given if value):
            return frozenset()
        allowed = [claim for claim in claims if rule.may_cut(claim.factor, claim.cut)]

        def nbytes(group: frozenset[int]) -> int:
            return max(self.program.value_type(value).nbytes for i, value in enumerate(given) if value and i in group)

        def may_ride(group: frozenset[int]) -> bool:
            partials = {self.lies[value].partial for i, value in enumerate(given) if value and i in group}
            partial = partials.pop()
            if partials or not partial or any(op != "sum" for _, op in partial):
                return False
            of_sum = len(group) > 1  # summands are added before their sum is scattered, wherever it is wished
            cut = [part for claim in allowed if not (of_sum and claim.is_wish) for part in claim.cut.all_axes]
            if any(part.overlaps(other) for part, _ in partial for other in cut):
                return False
            return self._stays_small(node, nbytes(group), tuple(part for part, _ in partial))

        return max((group for group in rule.linear if may_ride(group)), key=nbytes, default=frozenset())

    def _stays_small(self, node: fx.Node, nbytes: int, axes: Axes) -> bool:
        """Whether reducing the results moves no more than reducing the operands, or is a reduce_scatter instead.

        A gradient is cast to the dtype that it is to be reduced in, whatever that moves; no other cast widens a sum.
        """
        wished = self.program.shardings(node)[0]
        results = max(type_.nbytes for type_ in self.program.types(node) if type_ is not None)
        if is_cast(node):
            return results <= nbytes or node in self.reduced
        return results <= nbytes or (wished is not None and set(axes) <= set(wished.cut_axes))

    def _operand_sharding(self, rule: Rule, dims: Dims | None, cuts: Cuts, value: Value, passing: Partial) -> Sharding:
        lies = self.lies[value]
        if dims is None:
            return Sharding.replicated(lies.mesh, len(lies.dims))
        return Sharding(lies.mesh, dims_sharding(dims, cuts, rule.sizes), passing)

    def _result_sharding(
        self, node: fx.Node, rule: Rule, index: int, type_: TensorType, cuts: Cuts, passing: Partial
    ) -> Sharding:
        """Cut as its factors are; partial over the cuts of the factors that it does not have."""
        mesh, dims = self.program.mesh, rule.results[index]
        assert mesh is not None
        if dims is None:
            return Sharding.replicated(mesh, len(type_.shape))
        open_: Partial = tuple(
            (part, rule.reduce)
            for factor, cut in cuts.items()
            if rule.is_partial(factor, index)
            for part in cut.all_axes
        )
        return Sharding(mesh, dims_sharding(dims, cuts, rule.sizes), tuple(sorted(open_ + passing)))

    def _settled(self, value: Value, made: Sharding) -> Sharding:
        """Where a partial value lies once it is reduced: as propagate wished, else as it is."""
        if not made.partial:
            return made
        node, index = value
        wished = self.program.shardings(node)[index]
        assert wished is not None
        return wished


def _values_used_once(program: Program, node: fx.Node) -> Iterator[Value]:
    """The results of a call that have one user; with more, each would be reduced for itself."""
    for holder in node.users if program.has_many(node) else [node]:
        if len(holder.users) == 1:
            yield program.value(holder)


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
