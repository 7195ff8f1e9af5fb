"""Where one axis cuts the data and parameters: whether an op computes as the one is cut, or as the others are.

Propagate lets the data speak first, so that each op gathers its weights, as FSDP does. But a weight may share the dim
that is cut with the data, as experts do; then data may come to where the weights are::

    h = dot(sent, up, "e g c m, e m h -> e g c h")      # sent: f32[8, 16@ep, 4, 64], up: f32[8@ep, 64, 256]
        ->
    up is gathered; or sent comes by all_to_all to where its experts are, and what they made goes back

Such an op is on one side or the other. A side costs the reductions that its cuts leave, and an edge between the sides a
reshard; so the cheapest division of the program is a minimum cut of its graph. It is taken where the plan that follows
sends fewer bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from shardc.language.cut import extends, factor_cuts
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, Sharding
from shardc.program.node import is_annotation
from shardc.program.program import Program, Value, ends_of
from shardc.program.provenance import Origin

from ..propagate.cut_blocks import cut_blocks
from ..propagate.pins import Precedence
from ..propagate.propagate import propagate
from .choose_cuts import Cuts, Plan, Seen, Way, assign, choose_cuts, claims_on, move_bytes, num_pieces

DATA, PARAMETERS = "data", "parameters"  # the ends of the cut
Facts = tuple[tuple[Sharding | None, ...], tuple[Mapping[str, Origin], ...]]  # a node's shardings, their origins


def cheapest_plan(program: Program) -> Plan:
    """The plan of fewest bytes over each axis that data and parameters share; the program's shardings become its."""
    plan = choose_cuts(program)
    for axis in Precedence(program.pins).contested:
        first = frozenset({axis})
        other = propagate(cut_blocks(program, first), first)
        if any(
            _has_come(program, ours, other, theirs) for ours, theirs in zip(program.calls, other.calls, strict=True)
        ):
            plan = _divided(program, plan, other)
    return plan


def _has_come(program: Program, ours: fx.Node, other: Program, theirs: fx.Node) -> bool:
    """Whether a product with an input would be cut, with parameters first, along a dim that its tensors share."""
    rule = program.rule(ours)
    is_product = len(rule.operands) > 1 and any(map(rule.is_reduced, rule.sizes))
    if program.shardings(ours) == other.shardings(theirs) or not (
        is_product and any(map(_is_of_input, ours.all_input_nodes))
    ):
        return False
    cuts = [
        factor_cuts(rule.results[0] or (), by.sharding(node).dims, program.type(node).shape, rule.sizes)
        for by, node in ((program, ours), (other, theirs))
        if not program.has_many(ours)
    ]
    return len(cuts) == 2 and bool(_new(*cuts)) and _is_shared(rule, *cuts)


def _is_of_input(node: fx.Node) -> bool:
    """Whether a node is an input of the program, or made of one alone."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _is_shared(rule: Rule, ours: Cuts, theirs: Cuts) -> bool:
    """Whether all operands of an op, if it sums over some factors, have those that parameters would cut further."""
    tensors = [dims for dims in rule.operands if dims is not None and any(map(rule.is_reduced, rule.sizes))]
    return all(rule.has(factor, dims) for factor in _new(ours, theirs) for dims in tensors)


def _new(ours: Cuts, theirs: Cuts) -> list[str]:
    """The factors that parameters would cut further."""
    return [factor for factor, cut in theirs.items() if not extends(ours.get(factor, WHOLE), cut)]


def _divided(program: Program, plan: Plan, other: Program) -> Plan:
    """The plan, or that of the cheapest division between how its program is cut and how the other is."""
    data, parameters = _Side(program, plan.seen), _Side(other, {})
    crossed = _Division(program, data, parameters).cheapest()
    before = {node: data.facts(node) for node in crossed}
    _set(program, {node: parameters.facts(node) for node in crossed})
    found = choose_cuts(program, {**plan.seen, **_seen_across(program, data, parameters, crossed)}) if crossed else plan
    if found.wire_bytes < plan.wire_bytes:
        return found
    _set(program, before)
    return plan


def _set(program: Program, facts: Mapping[fx.Node, Facts]) -> None:
    for node, (shardings, origins) in facts.items():
        program.set_sharding(node, shardings if program.has_many(node) else shardings[0])
        program.set_origins(node, origins)


def _seen_across(program: Program, data: _Side, parameters: _Side, crossed: set[fx.Node]) -> Seen:
    """What an op takes from the other side, as its own side has it."""
    return {
        (node, value): (parameters if node in crossed else data).sharding(value)
        for node in program.calls
        for value in program.operand_values(node)
        if value is not None and (value[0] in crossed) != (node in crossed)
    }


class _Side:
    """How every op would be cut, were all values as one propagation has them. Nodes go by name, of whichever copy."""

    def __init__(self, program: Program, seen: Seen) -> None:
        self._program = program
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._lies = {
            (node, i): found
            for node in self._nodes.values()
            for i, found in enumerate(program.shardings(node))
            if found is not None
        }
        plan = Plan(program, set(), seen, lies=self._lies)
        self._cuts: dict[str, Cuts] = {}
        self._ways: dict[str, Way] = {}
        for node in program.calls:
            rule = program.rule(node)
            cuts = assign(rule, claims_on(program, node, rule, plan.seen_by(node)))
            self._cuts[node.name], self._ways[node.name] = cuts, plan.way(node, rule, cuts, frozenset(), ())

    def cuts(self, node: fx.Node) -> Cuts:
        """Which axes cut which factor of an op."""
        return self._cuts[node.name]

    def wanted(self, node: fx.Node) -> tuple[Sharding | None, ...]:
        """What an op's operands must be."""
        return self._ways[node.name][0]

    def sharding(self, value: Value) -> Sharding:
        """How a value lies."""
        return self._lies[self._nodes[value[0].name], value[1]]

    def facts(self, node: fx.Node) -> Facts:
        """What is known of a node's results."""
        own = self._nodes[node.name]
        return self._program.shardings(own), self._program.origins(own)

    def reduced(self, node: fx.Node) -> int:
        """Bytes that bring an op's results from how it makes them to how they lie."""
        return sum(
            move_bytes(made, self.sharding((node, i)), self._program.value_type((self._nodes[node.name], i)))
            for i, made in enumerate(self._ways[node.name][1])
            if made is not None
        )


@dataclass(slots=True)
class _Uses:
    """Who wants a value as one sharding: whatever their side, or those that are free only on one."""

    always: bool = False
    of_data: list[fx.Node] = field(default_factory=list)
    of_parameters: list[fx.Node] = field(default_factory=list)


@dataclass
class _Division:
    """The minimum cut: what is cut alike on both sides, or in fewer pieces beside parameters, stays with the data.

    So does an op that would gather data to compute with a part of a weight. An input that is not annotated lies as the
    one side or the other has it, and its gradient with it.

    In the graph an edge is cut from the data's end to the parameters' end. What several ops want alike is moved once:
    a node of its own, which is on their side if one of them is.
    """

    program: Program
    data: _Side
    parameters: _Side
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)
    free: set[fx.Node] = field(default_factory=set)

    def cheapest(self) -> set[fx.Node]:
        """The ops on the parameters' side."""
        inputs = zip(self.program.inputs, self.program.placeholders, strict=True)
        pinned = {(pin.kind, pin.name) for pin in self.program.pins}
        self.free = {node for given, node in inputs if (given.kind, given.name) not in pinned}
        self.free |= set(filter(self._is_free, self.program.calls))
        for node in self.program.calls:
            if node in self.free:
                self._costs(node, self.data.reduced(node), self.parameters.reduced(node))
        for value, uses in self._values().items():
            for target, found in uses.items():
                self._move(value, target, found)
        if not {DATA, PARAMETERS} <= set(self.graph):
            return set()
        _, side = nx.minimum_cut(self.graph, DATA, PARAMETERS, flow_func=boykov_kolmogorov)[1]
        return side & self.free

    def _is_free(self, node: fx.Node) -> bool:
        ours, theirs = self.data.cuts(node), self.parameters.cuts(node)
        is_alike = ours == theirs or is_annotation(node)
        return (
            not is_alike
            and num_pieces(ours) <= num_pieces(theirs)
            and _is_shared(self.program.rule(node), ours, theirs)
        )

    def _values(self) -> dict[Value, dict[Sharding, _Uses]]:
        found: dict[Value, dict[Sharding, _Uses]] = defaultdict(lambda: defaultdict(_Uses))
        for node in self.program.calls:
            wanted = zip(self.data.wanted(node), self.parameters.wanted(node), strict=True)
            for value, (ours, theirs) in zip(self.program.operand_values(node), wanted, strict=True):
                if value is not None and ours is not None and theirs is not None:
                    self._use(found[value], node, ours, theirs)
        for _, owner, result in ends_of(self.program):
            if owner is not None and result is not None:
                lies = (side.sharding((owner, 0)) for side in (self.data, self.parameters))
                self._use(found[self.program.value(result)], owner, *lies)
        return found

    def _use(self, uses: dict[Sharding, _Uses], node: fx.Node, ours: Sharding, theirs: Sharding) -> None:
        if node not in self.free or ours == theirs:
            uses[ours].always = True
        else:
            uses[ours].of_data.append(node)
            uses[theirs].of_parameters.append(node)

    def _move(self, value: Value, target: Sharding, uses: _Uses) -> None:
        """What it costs to bring a value to a sharding, from how either side has it."""
        type_, maker = self.program.value_type(value), value[0]
        ours = theirs = move_bytes(self.data.sharding(value), target, type_)
        if maker in self.free:
            theirs = move_bytes(self.parameters.sharding(value), target, type_)
        if uses.always:
            self._costs(maker, ours, theirs)
            return
        least = min(ours, theirs)
        if uses.of_parameters and ours:
            moved = (value, target, PARAMETERS)
            self._edge(DATA, moved, least)
            self._edge(maker, moved, ours - least)
            self.graph.add_edges_from((moved, user) for user in uses.of_parameters)
        if uses.of_data and theirs:
            moved = (value, target, DATA)
            self._edge(moved, PARAMETERS, least)
            self._edge(moved, maker, theirs - least)
            self.graph.add_edges_from((user, moved) for user in uses.of_data)

    def _costs(self, node: fx.Node, ours: int, theirs: int) -> None:
        """What an op's being on the data's side costs, and on the parameters'."""
        self._edge(node, PARAMETERS, ours)
        self._edge(DATA, node, theirs)

    def _edge(self, one: object, other: object, cost: int) -> None:
        if cost:
            known = self.graph.get_edge_data(one, other, {"capacity": 0})["capacity"]
            self.graph.add_edge(one, other, capacity=known + cost)
