"""Choose the cuts of each op, and the partial sums that are carried on, before any rewrite.

Each op's factors are cut in the way that moves the fewest bytes. A partial sum is carried through ops that are linear
in it, as long as it has one reader and nothing makes it larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import fx

from shardc.capture.decompositions import reduced_casts
from shardc.language.cut import dims_sharding, extends, factor_cuts
from shardc.language.mesh import MICROBATCH, Axes, AxisPart, merge_parts
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, DimSharding, OpenReductions, Sharding, ceil_div, num_shards, open_reductions
from shardc.program.node import is_annotation, is_cast, is_uniform
from shardc.program.program import Program, Value, ends_of, is_small_output
from shardc.program.provenance import PARAMETER, CutChoice, Cuts, OpTensors, Shardings, SideChoice

from .plan_reshard import move_bytes

StandIns = Mapping[tuple[fx.Node, Value], Sharding]


def choose_cuts(program: Program, stand_ins: StandIns | None = None) -> CutPlan:
    """Plan the cuts of every op of an annotated program. ``stand_ins``: see ``Arrivals``.

    At first every partial sum with one reader is carried on. Sums that meet an op they cannot pass are then reduced
    where they are made, until all carried sums pass.
    """
    holders = [holder for node in program.calls for holder in (node.users if program.has_many(node) else [node])]
    carried = {program.value(holder) for holder in holders if len(holder.users) == 1}
    planner, casts = None, reduced_casts(program)
    while True:
        inputs = {(node, 0): program.sharding(node) for node in program.placeholders}
        planner = _Planner(Arrivals(program, inputs, stand_ins or {}), carried, casts, planner)
        for node in program.calls:
            planner.decide(node)
        if not planner.blocked:
            return CutPlan(planner.arrivals, planner.ops, _output_shardings(planner.arrivals))
        carried = carried - planner.blocked


def _output_shardings(arrivals: Arrivals) -> list[Sharding | None]:
    """The sharding of each result: a gradient or buffer has its owner's, an output the pinned or else its current one.

    A small output is whole, except in a pipeline, where it comes in microbatches. None if there is no result.
    """
    program = arrivals.program
    assert program.mesh is not None
    is_in_microbatches = MICROBATCH in program.mesh.axis_names
    pinned = {("output", pin.name) for pin in program.pins if pin.kind == "output"}
    shardings: list[Sharding | None] = []
    for output, owner, result in ends_of(program):
        if owner is not None or result is None:
            shardings.append(None if owner is None else program.sharding(owner))
            continue
        producer, index = program.value(result)
        current, propagated = arrivals.shardings[producer, index], program.shardings(producer)[index]
        if is_small_output(program, output, result) and not is_in_microbatches:
            shardings.append(Sharding(program.mesh, (WHOLE,) * len(current.dims)))
            continue
        is_fixed = (output.kind, output.name) in pinned or current.partial
        shardings.append(propagated if is_fixed else current)
    return shardings


def current_shardings(program: Program) -> dict[Value, Sharding]:
    """The sharding of every value of a program."""
    pairs = ((node, enumerate(program.shardings(node))) for node in program.graph.nodes)
    return {(node, i): sharding for node, shardings in pairs for i, sharding in shardings if sharding is not None}


class OpShardings(NamedTuple):
    """The shardings that an op's operands are brought to, and those in which it makes its results."""

    operands: Shardings
    results: Shardings


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The cuts of every op, and the sharding of every output.

    ``arrivals``: the sharding of each value between its producer and its readers. ``sides``: whether data or
    parameters move.
    """

    arrivals: Arrivals
    ops: Mapping[fx.Node, CutChoice]
    outputs: list[Sharding | None]
    sides: tuple[SideChoice, ...] = ()

    @property
    def program(self) -> Program:
        """The planned program."""
        return self.arrivals.program

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends for all reshards. A value is brought to each sharding once."""
        program, current = self.program, self.arrivals.shardings
        reads = [(program.operand_values(node), op.operands) for node, op in self.ops.items()]
        results = tuple(None if node is None else program.value(node) for node in program.results)
        reads.append((results, tuple(self.outputs)))
        moves = {
            (value, current[value], to)
            for values, shardings in reads
            for value, to in zip(values, shardings, strict=True)
            if value and to and to != current[value] and not is_uniform(value[0])
        }
        made = (((node, i), result) for node, op in self.ops.items() for i, result in enumerate(op.results) if result)
        reductions = [(value, result, current[value]) for value, result in made if result != current[value]]
        return sum(move_bytes(src, dst, program.value_type(value)) for value, src, dst in (*moves, *reductions))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The current sharding of each value, in which it arrives at ops, and stand-ins for it.

    ``stand_ins``: by op and operand, the sharding by which an op claims cuts in place of the operand's own.
    """

    program: Program
    shardings: dict[Value, Sharding]
    stand_ins: StandIns = field(default_factory=dict)

    def claims(self, node: fx.Node) -> list[Claim]:
        """The claims on the factors of an op."""
        return claims_on(self.program, node, self.program.rule(node), partial(self.sharding, node))

    def sharding(self, node: fx.Node, value: Value) -> Sharding:
        """The sharding by which an operand claims cuts of an op."""
        return self.stand_ins.get((node, value)) or self.shardings[value]

    def tensors(self, node: fx.Node) -> OpTensors:
        """An op's operands as they arrive, and its results as propagated."""
        program, values = self.program, self.program.operand_values(node)
        assert program.mesh is not None
        return OpTensors(
            program.mesh,
            program.rule(node),
            tuple([None if value is None else program.value_type(value) for value in values]),
            tuple([None if value is None else self.shardings[value] for value in values]),
            frozenset([i for i, value in enumerate(values) if value and is_uniform(value[0])]),
            program.types(node),
            program.shardings(node),
        )


def op_shardings(tensors: OpTensors, cuts: Cuts, ride: Ride | None = None) -> OpShardings:
    """The shardings of an op's operands and results when its factors have these cuts.

    A result is partial over the cuts of the factors that it does not have.
    """
    ride, rule, mesh = ride or Ride(), tensors.rule, tensors.mesh
    operands: list[Sharding | None] = []
    for i, (arriving, dims) in enumerate(zip(tensors.arriving, rule.operands, strict=True)):
        if arriving is None or dims is None:
            operands.append(None if arriving is None else Sharding.replicated(mesh, len(arriving.dims)))
        else:
            open_ = ride.partial if i in ride.operands else ()
            operands.append(_like(arriving, dims_sharding(dims, cuts, rule.sizes), open_))
    results: list[Sharding | None] = []
    for i, (type_, propagated) in enumerate(zip(tensors.result_types, tensors.propagated, strict=True)):
        dims = rule.results[i]
        if type_ is None or propagated is None or dims is None:
            results.append(None if type_ is None else Sharding.replicated(mesh, len(type_.shape)))
        else:
            summed = [cut for factor, cut in cuts.items() if rule.is_partial(factor, i)]
            open_ = open_reductions([*((part, rule.reduce) for cut in summed for part in cut.all_axes), *ride.partial])
            results.append(_like(propagated, dims_sharding(dims, cuts, rule.sizes), open_))
    return OpShardings(tuple(operands), tuple(results))


def op_bytes(tensors: OpTensors, op: OpShardings | CutChoice) -> int:
    """Bytes that a rank sends to bring an op's operands to its cuts, and its results to their propagated shardings."""
    operands = enumerate(zip(tensors.arriving, op.operands, tensors.operand_types, strict=True))
    moves = [move for i, move in operands if i not in tensors.uniform]
    moves += zip(op.results, tensors.propagated, tensors.result_types, strict=True)
    return sum(move_bytes(src, dst, type_) for src, dst, type_ in moves if src and dst and type_)


def _like(known: Sharding, dims: tuple[DimSharding, ...], partial: OpenReductions) -> Sharding:
    """A sharding on the same mesh; ``known`` itself if it is equal."""
    is_known = known.dims == dims and known.partial == partial
    return known if is_known else Sharding(known.mesh, dims, partial)


class Ride(NamedTuple):
    """The operands whose partial sum an op passes on, and the sums open in them."""

    operands: frozenset[int] = frozenset()
    partial: OpenReductions = ()


@dataclass(slots=True)
class _Planner:
    """Decides op by op, in program order.

    ``carried``: values whose sum stays open; others are reduced where computed. ``gradient_casts``: casts to the
    dtype that gradients are reduced in. ``last``: the planner whose blocked sums are no longer carried. ``blocked``:
    carried sums that met an op they cannot pass.
    """

    arrivals: Arrivals
    carried: set[Value]
    gradient_casts: set[fx.Node]
    last: _Planner | None = None
    ops: dict[fx.Node, CutChoice] = field(default_factory=dict)
    blocked: set[Value] = field(default_factory=set)

    def decide(self, node: fx.Node) -> None:
        """Choose the cuts of an op, and set the shardings of its results."""
        propagated, shardings = self.arrivals.program.shardings(node), self.arrivals.shardings
        op = self.ops[node] = self._as_last(node) or self._undisputed(node) or self._cheapest(node)
        for index, (result, target) in enumerate(zip(op.results, propagated, strict=True)):
            if result is not None:
                is_reduced = result.partial and (node, index) not in self.carried
                shardings[node, index] = target if is_reduced and target else result

    def _as_last(self, node: fx.Node) -> CutChoice | None:
        """The last planner's choice, if the operands arrive as they did then."""
        if self.last is None:
            return None
        before, now = self.last.arrivals.shardings, self.arrivals.shardings
        is_same = all(before[value] == now[value] for value in self.arrivals.program.operand_values(node) if value)
        return self.last.ops[node] if is_same else None

    def _undisputed(self, node: fx.Node) -> CutChoice | None:
        """The choice for an op whose tensors agree about the cut of each factor and have no open sum; else None.

        It depends only on the rule and the shardings, so it is made once for equal ops.
        """
        program, shardings = self.arrivals.program, self.arrivals.shardings
        rule, values, propagated = program.rule(node), program.operand_values(node), program.shardings(node)
        arriving = tuple([None if value is None else shardings[value] for value in values])
        stand_ins = self.arrivals.stand_ins
        if is_annotation(node) or (stand_ins and any((node, value) in stand_ins for value in values if value)):
            return None
        uniform = tuple([bool(value and is_uniform(value[0])) for value in values])
        key = _Planner._undisputed, arriving, propagated, uniform
        if key not in rule.known:
            tensors = self.arrivals.tensors(node)
            types = (*tensors.operand_types, *tensors.result_types)
            shapes = [None if type_ is None else type_.shape for type_ in types]
            cuts = undisputed_cuts(rule, arriving, propagated, shapes)
            rule.known[key] = None
            if cuts is not None:
                op = op_shardings(tensors, cuts)
                rule.known[key] = CutChoice(tensors, (cuts,), op.operands, op.results)
        found: CutChoice | None = rule.known[key]
        return found

    def _cheapest(self, node: fx.Node) -> CutChoice:
        program, shardings = self.arrivals.program, self.arrivals.shardings
        claims = self.arrivals.claims(node)
        ride, values = self._ride(node, claims), program.operand_values(node)
        self.blocked |= {v for i, v in enumerate(values) if v and shardings[v].partial and i not in ride.operands}
        tensors, considered = self.arrivals.tensors(node), list[Cuts]()
        if is_annotation(node):
            ways = [OpShardings(tensors.propagated, tensors.propagated)]  # as the user wrote it, even of one element
        else:
            considered = choices(tensors.rule, claims, tuple(part for part, _ in ride.partial))
            ways = [op_shardings(tensors, cuts, ride) for cuts in considered]
        op = ways[0] if len(ways) == 1 else min(ways, key=partial(op_bytes, tensors))
        return CutChoice(tensors, tuple(considered), op.operands, op.results)

    def _ride(self, node: fx.Node, claims: list[Claim]) -> Ride:
        """The operands whose partial sum may pass through an op: a whole linear group, open over the same axes."""
        program, shardings = self.arrivals.program, self.arrivals.shardings
        rule, values = program.rule(node), program.operand_values(node)
        partials = {i: shardings[value].partial for i, value in enumerate(values) if value}
        if not any(partials.values()):
            return Ride()
        allowed = [claim for claim in claims if rule.may_cut(claim.factor, claim.cut)]
        rides: dict[Ride, int] = {}
        for group in rule.linear:
            open_ = {partials[i] for i in group if i in partials}
            ride = Ride(group, open_.pop())
            nbytes = max(program.value_type(value).nbytes for i in group if (value := values[i]))
            if not open_ and self._may_ride(node, ride, nbytes, allowed):
                rides[ride] = nbytes
        return max(rides, key=rides.__getitem__, default=Ride())

    def _may_ride(self, node: fx.Node, ride: Ride, nbytes: int, claims: list[Claim]) -> bool:
        """Whether a sum may stay open through an op: its axes must not cut the op, nor may it send more bytes.

        Summands are added before their sum is scattered, whatever sharding the sum will have, so the claims of results
        do not count then. A result larger than the operands, of ``nbytes``, must be scattered. The only cast that may
        enlarge a sum is that of a gradient to the dtype it is reduced in.
        """
        if not ride.partial or any(op != "sum" for _, op in ride.partial):
            return False
        is_sum = len(ride.operands) > 1
        cut = [part for claim in claims if not (is_sum and claim.is_of_result) for part in claim.cut.all_axes]
        axes = [part for part, _ in ride.partial]
        if any(part.overlaps(other) for part in axes for other in cut):
            return False
        program = self.arrivals.program
        propagated = program.shardings(node)[0]
        if max(type_.nbytes for type_ in program.types(node) if type_ is not None) <= nbytes:
            return True
        if is_cast(node):
            return node in self.gradient_casts
        cutting = () if propagated is None else merge_parts(sorted(propagated.cut_axes))
        return all(any(each.includes(part) for each in cutting) for part in axes)


# Claims, and which of them are granted.


@dataclass(frozen=True, slots=True)
class Claim:
    """The cut that one tensor of an op has for a factor, or is to have if ``is_of_result``.

    ``rank``: the rank of the cut's origin. ``nbytes``: bytes of the tensor on one rank.
    """

    factor: str
    cut: DimSharding
    rank: int
    nbytes: int
    is_of_result: bool


def claims_on(program: Program, node: fx.Node, rule: Rule, sharding_of: Callable[[Value], Sharding]) -> list[Claim]:
    """The claims of an op's operands in the shardings of ``sharding_of``, and of its results as propagated.

    In an annotation only the result has claims.
    """
    operands = [] if is_annotation(node) else list(zip(program.operand_values(node), rule.operands, strict=True))
    tensors = [(value, dims, sharding_of(value), False) for value, dims in operands if value]
    results = enumerate(zip(rule.results, program.shardings(node), strict=True))
    tensors += [((node, i), dims, sharding, True) for i, (dims, sharding) in results if sharding is not None]
    claims: list[Claim] = []
    for value, dims, sharding, is_of_result in tensors:
        type_, origins = program.value_type(value), program.origins(value[0])[value[1]]
        nbytes = ceil_div(type_.nbytes, num_shards(sharding.cut_axes))
        cuts = {} if dims is None else factor_cuts(dims, sharding.dims, type_.shape, rule.sizes)
        for factor, cut in cuts.items():
            rank = min((origins[part.name].rank for part in cut.all_axes if part.name in origins), default=PARAMETER)
            claims.append(Claim(factor, cut, rank, nbytes, is_of_result))
    return claims


def undisputed_cuts(
    rule: Rule, operands: Shardings, results: Shardings, shapes: Sequence[tuple[int, ...] | None]
) -> Cuts | None:
    """The cut of each factor if all tensors that cut it agree and no other factor wants its axes; else None."""
    cuts: Cuts = {}
    for dims, sharding, shape in zip(rule.operands + rule.results, operands + results, shapes, strict=True):
        if sharding is None or shape is None:
            continue
        if sharding.partial:
            return None
        found = {} if dims is None else factor_cuts(dims, sharding.dims, shape, rule.sizes)
        for factor, cut in found.items():
            if cuts.setdefault(factor, cut) != cut:
                return None
    used: list[AxisPart] = []
    for factor, cut in cuts.items():
        if not rule.may_cut(factor, cut) or any(part.overlaps(other) for part in cut.all_axes for other in used):
            return None
        used += cut.all_axes
    return cuts


def choices(rule: Rule, claims: list[Claim], taken: Axes = ()) -> list[Cuts]:
    """The cuts in the claims' own order, and those with another claim first. ``taken`` axes cut nothing."""
    ways = [assign(rule, claims, taken)]
    for claim in claims:
        if ways[0].get(claim.factor, WHOLE) != claim.cut and rule.may_cut(claim.factor, claim.cut):
            cuts = assign(rule, claims, taken, first=claim)
            if cuts not in ways and num_pieces(cuts) >= num_pieces(ways[0]):
                ways.append(cuts)
    return ways


def assign(rule: Rule, claims: list[Claim], taken: Axes = (), first: Claim | None = None) -> Cuts:
    """The cut of each factor, where an axis may cut only one factor.

    The claim of the lowest rank wins; among equals ``first``, then the one of more bytes, then the earlier factor. A
    claim that loses an axis keeps the axes before it. ``taken`` axes cut nothing: a partial sum over them passes.
    """
    order = {factor: i for i, factor in enumerate(rule.sizes)}
    cuts: Cuts = {}
    for claim in sorted(claims, key=lambda claim: (claim.rank, claim is not first, -claim.nbytes, order[claim.factor])):
        have = cuts.get(claim.factor, WHOLE)
        if rule.may_cut(claim.factor, claim.cut) and extends(claim.cut, have):
            used = [*taken, *(part for factor, cut in cuts.items() if factor != claim.factor for part in cut.all_axes)]
            granted, free = claim.cut, [not any(map(part.overlaps, used)) for part in claim.cut.all_axes]
            if not all(free):
                granted = WHOLE if granted.minor else DimSharding(granted.axes[: free.index(False)])
            if granted != WHOLE and rule.may_cut(claim.factor, granted) and extends(granted, have):
                cuts[claim.factor] = granted
    return cuts


def num_pieces(cuts: Cuts) -> int:
    """The number of pieces that an op's work is cut into."""
    return math.prod(num_shards(cut.all_axes) for cut in cuts.values())
