"""Lowers the calls of a part of a program to an fx graph of kernels, from which fx generates Python.

::

    def forward(self, values, comm):
        x = values[0]
        weight = values[1]
        clear = values.clear();  values = clear = None
        mm = torch.mm(x, weight);  x = weight = None
        all_reduce = all_reduce_start(comm, [mm]);  comm = mm = None
        call = _operator_call(all_reduce);  all_reduce = None
        getitem = call[0];  call = None
        return (getitem,)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from shardc.ops.codes import left_out_rows, replace_residuals
from shardc.ops.contraction import BoundDot, Steps, dot, stepped
from shardc.ops.tier import TRANSFERS
from shardc.program.coding.nodes import residuals_before
from shardc.program.collective import EXCHANGES, GO_ROUND, group_size
from shardc.program.communication import bucket, is_saved, members
from shardc.program.lifetime import dies_at, view_chain
from shardc.program.node import is_free, operand, operands, takes_device
from shardc.program.program import Program
from shardc.program.text import range_name

from ..comm import ring
from ..comm.comm import BucketLayout, Comm, start_packed
from ..tier.tier import tier_in, tier_of
from .kernel import biased_products, kernel_of, overwriting

Wait = Callable[[], Sequence[Any]]  # waits for a collective, and returns the result of each rank
aten = torch.ops.aten
SAVE, RESTORE = "save", "restore"  # kinds of transfers of values saved for backward
METHODS: dict[Any, str] = {  # methods of tensors, which parse their arguments in half the time of the op
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.view.default: "view",
    aten.unsqueeze.default: "unsqueeze",
    **{getattr(aten, name).Tensor: name for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")},
}


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """The target of a collective: its kind and its arguments after the operand, or the ``layout`` of a bucket.

    ``axes``: the printed axes that it names. ``is_own``: nobody else reads the memory of its operand.
    """

    kind: str
    args: tuple[Any, ...]
    axes: tuple[str, ...]
    layout: BucketLayout | None
    is_own: bool

    def start(self, comm: Comm, *columns: Sequence[Tensor], into: Sequence[Any] = ()) -> Wait:
        """Start it on operands with an entry for each rank. ``into``: tensors that a gather may write to."""
        if self.layout is not None:
            return comm.start_bucket(self.layout, list(zip(*columns, strict=True)), into)
        return comm.start(self.kind, columns[0], *self.args, is_own=self.is_own, into=into)

    def start_packed(self, comm: Comm, buffers: Sequence[Tensor]) -> Wait:
        """Start it on one buffer for each rank, which holds the operands."""
        assert self.layout is not None
        return start_packed(comm, self.layout, buffers)


class RingCollective(Collective):
    """A ring, which is done when ``start`` returns."""

    def start(self, comm: Comm, *columns: Sequence[Tensor], into: Sequence[Any] = ()) -> Wait:
        rows = getattr(ring, self.kind)(comm, *self.args, *columns)
        return lambda: rows


class Transfer(Collective):
    """A copy between a rank's device and the tier below it, by a method of ``Tier``; ranks exchange nothing."""

    def start(self, comm: Comm, *columns: Sequence[Tensor], into: Sequence[Any] = ()) -> Wait:
        (xs,), (tier,) = columns, self.args
        if self.kind == "fetch":
            waits = [tier.fetch(x, place) for x, place in zip_longest(xs, into)]
        else:
            waits = [getattr(tier, self.kind)(x) for x in xs]
        return lambda: [wait() for wait in waits]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The program's call that a node comes from: its slot, and the user's line as ``file.py:line``.

    ``name``: the name of its range in a trace; empty for views.
    """

    slot: int
    name: str
    line: str
    collective: Collective | None


class PartGraph:
    """The graph of a part, which takes a list of ``values`` and a ``comm``.

    ``nodes``: by slot the node of a value. ``reads``: the slots of ``values``. ``used_up``: the slots of earlier parts
    whose memory it overwrites. ``places``: by a node's name, the call that it comes from. ``slots``: those of a
    program's nodes.
    """

    def __init__(self, slots: Mapping[fx.Node, int]) -> None:
        self.graph, self.slots = fx.Graph(), slots
        self.values, self.comm = self.graph.placeholder("values"), self.graph.placeholder("comm")
        self.clear = self.graph.call_method("clear", (self.values,))
        self.nodes, self.reads, self.used_up = dict[int, fx.Node](), list[int](), set[int]()
        self.places: dict[str, Place] = {}
        self._matrices: dict[tuple[fx.Node, Steps], fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """The node for the value of a program's node."""
        return self.read(self.slots[node], node.name)

    def read(self, slot: int, name: str | None = None) -> fx.Node:
        """The node for the value of a slot, which is read from an earlier part if it is not computed here."""
        if slot not in self.nodes:
            with self.graph.inserting_before(self.clear):
                args = self.values, len(self.reads)
                self.nodes[slot] = self.graph.create_node("call_function", operator.getitem, args, name=name)
            self.reads.append(slot)
        return self.nodes[slot]

    def write(self, node: fx.Node, place: Place) -> None:
        """Make a node the value of a place's slot, and note the place of it and of the nodes that were added for it."""
        self.nodes[place.slot] = node
        while node is not self.clear and node.name not in self.places:
            self.places[node.name], node = place, node.prev

    def product(self, node: fx.Node, program: Program, bias: fx.Node | None = None) -> fx.Node:
        """Add a contraction; a matrix that several products share is made once."""
        a, b = operand(node), operand(node, 1)
        shapes = [program.value_type(program.value(each)).shape for each in (a, b)]
        bound, tracer = BoundDot(str(node.args[2]), *shapes), GraphAppendingTracer(self.graph)

        def matrix(each: fx.Node, steps: Steps) -> fx.Proxy:
            if (each, steps) not in self._matrices:
                self._matrices[each, steps] = stepped(fx.Proxy(each, tracer), steps).node
            return fx.Proxy(self._matrices[each, steps], tracer)

        added = None if bias is None else fx.Proxy(self.of(bias), tracer)
        result: fx.Proxy = bound.product(matrix(self.of(a), bound.left), matrix(self.of(b), bound.right), added)
        return result.node

    def call(self, node: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """Add the call of a kernel, or of a method of tensors."""
        args, kwargs = fx.map_arg((tuple(args), dict(kwargs)), self.of)
        if target in METHODS and not kwargs and isinstance(args[0], fx.Node):
            return self.graph.create_node("call_method", METHODS[target], args, name=node.name)
        return self.graph.create_node("call_function", kernel_of(node, target), args, kwargs, node.name)

    def start(self, node: fx.Node, collective: Collective) -> fx.Node:
        """Add a collective on one rank's operands."""
        columns: Any = [[self.of(each)] for each in operands(node) if each is not None]
        return self.graph.create_node("call_function", collective.start, (self.comm, *columns), name=node.name)


def lower(part: Sequence[fx.Node], slots: Mapping[fx.Node, int], device: torch.device, program: Program,
          is_eager: bool, before: Sequence[fx.Node] = ()) -> PartGraph:  # fmt: skip
    """The graph of a part of a program.

    ``is_eager``: ops run and are not traced for a compiler, so that kernels are chosen here. ``before``: calls of
    earlier parts; their results may be overwritten if only this part still reads them.
    """
    result, products = PartGraph(slots), biased_products(part, program) if is_eager else {}
    order = {node: i for i, node in enumerate((*before, *part), -len(before))} if is_eager else {}
    order |= {product: order[node] for node, product in products.items()}
    fused = set(products.values())
    for node in part:
        assert node.op == "call_function" and callable(node.target), node.format_node()
        if node in fused:
            continue
        product, collective = products.get(node, node), _collective(program, node, order, device)
        overwritten: fx.Node | None = None
        if collective is not None:
            lowered = result.start(node, collective)
            overwritten = operand(node) if collective.is_own and collective.layout is None else None
        elif product.target is dot and is_eager:
            lowered = result.product(product, program, operand(node, 1) if product is not node else None)
        else:
            in_place = overwriting(node, order, program, device)
            target, args = in_place or (node.target, node.args)
            overwritten = in_place[1][0] if in_place else None
            if is_eager and node.target is left_out_rows and residuals_before(node):
                target = replace_residuals
            kwargs = {**node.kwargs, **({"device": device} if takes_device(node.target) else {})}
            lowered = result.call(node, target, args, kwargs)
        chain = view_chain(overwritten) if overwritten is not None else ()
        result.used_up.update(islice((slots[each] for each in chain if order.get(each, 0) < 0), 1))
        name = "" if is_free(node) else range_name(program, product)
        result.write(lowered, Place(slots[node], name, program.source(node).location, collective))
    return result


def _collective(
    program: Program, node: fx.Node, order: Mapping[fx.Node, int], device: torch.device
) -> Collective | None:
    """The collective or the transfer of a call.

    None for an op, for groups of one rank, which exchange nothing, and before localize.
    """
    parts = members(node)
    args: tuple[Any, ...] = node.args[1:]
    target: Any = node.target
    if program.level != "localized":
        return None
    if target in TRANSFERS:
        tier = tier_in(str(args[0]), device) if args else tier_of(program.options.zero, device)
        way = target.__name__ if not args else SAVE if is_saved(node) else RESTORE
        return None if tier is None else Transfer(way, (tier,), (), None, is_own=False)
    if not (parts or target in EXCHANGES):
        return None
    if not parts:
        kind = RingCollective if target in GO_ROUND else Collective
        fixed = tuple(arg for arg in args if not isinstance(arg, fx.Node))
        return kind(EXCHANGES[target], fixed, args[0], None, is_own=False) if args[0] else None
    assert program.mesh is not None
    if group_size(program.mesh, parts[0].kind, parts[0].args) == 1:
        return None
    if target is bucket:
        return Collective(parts[0].kind, args, args[0], BucketLayout.of(program, node), is_own=True)
    axes = tuple(dict.fromkeys((*args[0], *args[1]))) if parts[0].kind == "collective_permute" else args[0]
    return Collective(parts[0].kind, args, axes, None, dies_at(operand(node), node, order))
