"""Choose whether an op is cut as its data or as its parameters are, where one axis cuts both.

Propagate lets the data come first, so that each op gathers its weights, as FSDP does. But a weight may share the cut
dim with the data, as weights of experts do. Then the data can be sent to the weights::

    h = dot(sent, up, "e g c m, e m h -> e g c h")      # sent: f32[8, 16@ep, 4, 64], up: f32[8@ep, 64, 256]
        ->
    either up is gathered; or sent goes by all_to_all to its experts, and h comes back

Each such op is on one side or the other. An op costs the reductions that the cuts of its side leave, and an edge
between the sides costs a reshard. So the cheapest division of the program is a minimum cut of its graph. The division
is taken if its plan sends fewer bytes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import fx

from shardc.language.cut import extends, factor_cuts
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, Sharding
from shardc.program.node import is_annotation
from shardc.program.program import Program, Value, ends_of
from shardc.program.provenance import Cuts, SideChoice

from ..propagate.cut_blocks import cut_blocks
from ..propagate.propagate import Precedence, propagated
from .choose_cuts import (
    Arrivals,
    CutPlan,
    OpShardings,
    StandIns,
    assign,
    choose_cuts,
    current_shardings,
    num_pieces,
    op_shardings,
)
from .choose_dims import Facts, set_facts, with_moved_axes
from .plan_reshard import move_bytes

if TYPE_CHECKING:
    import networkx as nx

DATA, PARAMETERS = "data", "parameters"  # the ends of the minimum cut


def cheapest_plan(program: Program) -> CutPlan:
    """The plan of fewest bytes: sides for each axis that data and parameters share, and axes moved off whole dims.

    Sets the program's shardings to it.
    """
    plan = of_data = choose_cuts(program)
    contested = Precedence(program.pins).contested
    data_bytes = of_data.wire_bytes if contested else 0
    products = {node.name: node for node in program.calls if _may_be_divided(program, node)} if contested else {}
    for axis in contested if products else ():
        other = with_parameters_first(program, axis)
        pairs = ((products[node.name], node) for node in other.calls if node.name in products)
        if any(_is_other_product(program, ours, other, theirs) for ours, theirs in pairs):
            plan = _divided(program, plan, other)
    plan = with_moved_axes(plan)
    wire_bytes = data_bytes if plan is of_data or not contested else plan.wire_bytes
    return replace(plan, sides=tuple([SideChoice(axis, data_bytes, wire_bytes) for axis in contested]))


def with_parameters_first(program: Program, axis: str) -> Program:
    """The program propagated with parameters before data over an axis."""
    first = frozenset({axis})
    return propagated(cut_blocks(program, first), first)


def _may_be_divided(program: Program, node: fx.Node) -> bool:
    """Whether an op is a product with an input, and all its tensors share a dim that may be cut."""
    rule = program.rule(node)
    is_product = len(rule.operands) > 1 and any(map(rule.is_reduced, rule.sizes)) and not program.has_many(node)
    return is_product and any(map(_is_of_input, node.all_input_nodes)) and _has_shared_factor(rule)


def _has_shared_factor(rule: Rule) -> bool:
    """Whether all tensors of an op have a factor that may be cut; one of a single element never is."""
    tensors = [dims for dims in (*rule.operands, *rule.results) if dims is not None]
    return any(size > 1 and all(rule.has(factor, dims) for dims in tensors) for factor, size in rule.sizes.items())


def _is_other_product(program: Program, ours: fx.Node, other: Program, theirs: fx.Node) -> bool:
    """Whether a product would be cut along a dim that its tensors share if parameters came first."""
    if program.shardings(ours) == other.shardings(theirs):
        return False
    rule = program.rule(ours)
    our_cuts, their_cuts = (
        factor_cuts(rule.results[0] or (), by.sharding(node).dims, program.type(node).shape, rule.sizes)
        for by, node in ((program, ours), (other, theirs))
    )
    return bool(_new_factors(our_cuts, their_cuts)) and _is_shared(rule, our_cuts, their_cuts)


def _is_of_input(node: fx.Node) -> bool:
    """Whether a node is an input of the program, or computed from one alone."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _is_shared(rule: Rule, ours: Cuts, theirs: Cuts) -> bool:
    """Whether all operands of an op have the factors that parameters would cut further; true if it sums over none."""
    tensors = [dims for dims in rule.operands if dims is not None and any(map(rule.is_reduced, rule.sizes))]
    return all(rule.has(factor, dims) for factor in _new_factors(ours, theirs) for dims in tensors)


def _new_factors(ours: Cuts, theirs: Cuts) -> list[str]:
    """The factors that parameters would cut further."""
    return [factor for factor, cut in theirs.items() if not extends(ours.get(factor, WHOLE), cut)]


def _divided(program: Program, plan: CutPlan, other: Program) -> CutPlan:
    """The plan, or that of the cheapest division between the cuts of its program and the other's, if it sends less."""
    stand_ins = plan.arrivals.stand_ins
    data, parameters = _Side(program, stand_ins), _Side(other, {})
    crossed = _Division(program, data, parameters).cheapest()
    if not crossed:
        return plan
    of_operands = {  # an operand from the other side has its sharding on the op's own side
        (node, value): (parameters if node in crossed else data).sharding(value)
        for node in program.calls
        for value in program.operand_values(node)
        if value is not None and (value[0] in crossed) != (node in crossed)
    }
    before, wire_bytes = {node: data.facts(node) for node in crossed}, plan.wire_bytes
    set_facts(program, {node: parameters.facts(node) for node in crossed})
    divided = choose_cuts(program, {**stand_ins, **of_operands})
    if divided.wire_bytes < wire_bytes:
        return divided
    set_facts(program, before)
    return plan


class _Side:
    """The cuts of every op if all values had the shardings of one propagation. Nodes of any copy are found by name."""

    def __init__(self, program: Program, stand_ins: StandIns) -> None:
        self._program = program
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._arrivals = Arrivals(program, current_shardings(program), stand_ins)
        self.cuts: dict[str, Cuts] = {}  # the cuts of an op's factors, by its name
        self.ops: dict[str, OpShardings] = {}
        for node in program.calls:
            cuts = self.cuts[node.name] = assign(program.rule(node), self._arrivals.claims(node))
            self.ops[node.name] = op_shardings(self._arrivals.tensors(node), cuts)

    def sharding(self, value: Value) -> Sharding:
        """The sharding of a value."""
        return self._arrivals.shardings[self._nodes[value[0].name], value[1]]

    def facts(self, node: fx.Node) -> Facts:
        """The shardings and origins of a node's results."""
        own = self._nodes[node.name]
        return self._program.shardings(own), self._program.origins(own)

    def reduction_bytes(self, node: fx.Node) -> int:
        """Bytes that bring an op's results, as it makes them, to their shardings."""
        return sum(
            move_bytes(result, self.sharding((node, i)), self._program.value_type((self._nodes[node.name], i)))
            for i, result in enumerate(self.ops[node.name].results)
            if result is not None
        )


@dataclass(slots=True)
class _Readers:
    """The ops that need a value in one sharding: some on any side, others on one side alone."""

    on_any_side: bool = False
    of_data: list[fx.Node] = field(default_factory=list)
    of_parameters: list[fx.Node] = field(default_factory=list)


@dataclass
class _Division:
    """The minimum cut. Ops that are not ``free`` stay with the data.

    An op is free if parameters would cut it otherwise, in no fewer pieces, and along dims that all operands share.
    Inputs that are not annotated are free too, and their gradients with them. In the graph an edge is cut if it leads
    from the data's side to the parameters'. A value that several ops need in one sharding is moved once: the move is a
    node of its own, on the readers' side if one of them is there.
    """

    program: Program
    data: _Side
    parameters: _Side
    graph: nx.DiGraph = field(init=False)
    free: set[fx.Node] = field(default_factory=set)

    def cheapest(self) -> set[fx.Node]:
        """The ops on the parameters' side."""
        import networkx as nx  # here, since few programs need it
        from networkx.algorithms.flow import boykov_kolmogorov

        self.graph = nx.DiGraph()
        inputs = zip(self.program.inputs, self.program.placeholders, strict=True)
        pinned = {(pin.kind, pin.name) for pin in self.program.pins}
        self.free = {node for entry, node in inputs if (entry.kind, entry.name) not in pinned}
        for node in self.program.calls:
            ours, theirs = self.data.cuts[node.name], self.parameters.cuts[node.name]
            if ours == theirs or is_annotation(node) or num_pieces(ours) > num_pieces(theirs):
                continue
            if _is_shared(self.program.rule(node), ours, theirs):
                self.free.add(node)
                self._add_costs(node, self.data.reduction_bytes(node), self.parameters.reduction_bytes(node))
        for value, readers_by_target in self._readers().items():
            for target, readers in readers_by_target.items():
                self._add_move(value, target, readers)
        if not {DATA, PARAMETERS} <= set(self.graph):
            return set()
        _, side = nx.minimum_cut(self.graph, DATA, PARAMETERS, flow_func=boykov_kolmogorov)[1]
        return side & self.free

    def _readers(self) -> dict[Value, dict[Sharding, _Readers]]:
        """The readers of each value, by the sharding that they need it in."""
        readers: dict[Value, dict[Sharding, _Readers]] = defaultdict(lambda: defaultdict(_Readers))

        def add(value: Value, reader: fx.Node, ours: Sharding, theirs: Sharding) -> None:
            if reader not in self.free or ours == theirs:
                readers[value][ours].on_any_side = True
            else:
                readers[value][ours].of_data.append(reader)
                readers[value][theirs].of_parameters.append(reader)

        for node in self.program.calls:
            sides = self.data.ops[node.name].operands, self.parameters.ops[node.name].operands
            for value, ours, theirs in zip(self.program.operand_values(node), *sides, strict=True):
                if value is not None and ours is not None and theirs is not None:
                    add(value, node, ours, theirs)
        for _, owner, result in ends_of(self.program):
            if owner is not None and result is not None:
                ours, theirs = self.data.sharding((owner, 0)), self.parameters.sharding((owner, 0))
                add(self.program.value(result), owner, ours, theirs)
        return readers

    def _add_move(self, value: Value, target: Sharding, readers: _Readers) -> None:
        """Add the cost to bring a value to a sharding, from its sharding on either side."""
        type_, maker = self.program.value_type(value), value[0]
        ours = theirs = move_bytes(self.data.sharding(value), target, type_)
        if maker in self.free:
            theirs = move_bytes(self.parameters.sharding(value), target, type_)
        if readers.on_any_side:
            self._add_costs(maker, ours, theirs)
            return
        least = min(ours, theirs)
        if readers.of_parameters and ours:
            moved = (value, target, PARAMETERS)
            self._add_edge(DATA, moved, least)
            self._add_edge(maker, moved, ours - least)
            self.graph.add_edges_from((moved, reader) for reader in readers.of_parameters)
        if readers.of_data and theirs:
            moved = (value, target, DATA)
            self._add_edge(moved, PARAMETERS, least)
            self._add_edge(moved, maker, theirs - least)
            self.graph.add_edges_from((reader, moved) for reader in readers.of_data)

    def _add_costs(self, node: fx.Node, of_data: int, of_parameters: int) -> None:
        """Add the cost of an op on the data's side, and that of the op on the parameters' side."""
        self._add_edge(node, PARAMETERS, of_data)
        self._add_edge(DATA, node, of_parameters)

    def _add_edge(self, start: object, end: object, cost: int) -> None:
        if cost:
            known = self.graph.get_edge_data(start, end, {"capacity": 0})["capacity"]
            self.graph.add_edge(start, end, capacity=known + cost)
