"""Rewrites of a part's graph before fx generates Python from it: buffers, late waits, sums, ranges, several ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import record_function

from shardc.ops import tier
from shardc.program.communication import LARGE_PRODUCT

from ..comm.comm import put
from ..comm.process_group import WAIT
from .lower import SAVE, Collective, PartGraph, Place

PRODUCTS = (torch.mm, torch.bmm, torch.addmm)
MOST_UNDER_WAY = {"reduce_scatter": 2, SAVE: tier.MOST_UNDER_WAY}  # by kind, over the same axes
Taker = Callable[[int, Tensor], None]  # takes the index of an output and a rank's shard of it
SUMS: dict[Any, tuple[Any, str]] = {torch.mm: (torch.addmm, "addmm_"), torch.bmm: (torch.baddbmm, "baddbmm_")}


def collective_of(node: fx.Node) -> Collective | None:
    """The collective that a node starts."""
    bound = node.target.__self__ if isinstance(node.target, MethodType) else None
    return bound if isinstance(bound, Collective) else None


def with_targets(part: PartGraph, targets: Mapping[int, int], in_place: bool) -> None:
    """Write values to tensors. ``targets``: by slot of a value, the slot of its tensor, which may be None.

    ``in_place``: gathers write to the tensors themselves. All other values are copied where they are computed.
    """
    graph = part.graph
    into: dict[fx.Node, list[fx.Node | None]] = {}
    for slot, target in targets.items():
        value, place = part.read(slot), part.read(target)
        producer, member = value.args[:2] if value.target is operator.getitem else (value, 0)
        if in_place and isinstance(producer, fx.Node) and collective_of(producer) is not None:
            assert isinstance(member, int)
            into.setdefault(producer, [None] * (len(producer.args) - 1))[member] = place
        with graph.inserting_after(None if in_place else value):
            part.nodes[slot] = graph.call_function(_stored, (place, value))
    for start, row in into.items():
        collective = collective_of(start)
        assert collective is not None
        start.kwargs = {"into": [row] if collective.layout else row}


def _stored(target: Tensor | None, value: Tensor) -> Tensor:
    return value if target is None or target is value else target.copy_(value)


def with_sums(part: PartGraph, open_slots: Collection[int], deferred: Collection[int], offset: int,
              is_own: bool) -> None:  # fmt: skip
    """Add the value of each open slot to its total, ``offset`` slots later; deferred readers read the total.

    The addition comes after the last reader that is not deferred. If a collective's result has only deferred readers,
    it comes just before the first of them, so that it does not wait early. A product that nobody else reads adds to the
    total in its own kernel. ``is_own``: the totals may be overwritten.
    """
    graph, order = part.graph, {node: i for i, node in enumerate(part.graph.nodes)}
    for slot in sorted(open_slots):
        value, total = part.read(slot), part.read(slot + offset)
        readers = sorted(value.users, key=order.__getitem__)
        late = [each for each in readers if part.places[each.name].slot in deferred]
        others = [each for each in readers if each not in late]
        if not others and value.target in SUMS:
            apart, over = SUMS[value.target]
            value.op, value.target = ("call_method", over) if is_own else ("call_function", apart)
            value.args = (total, *value.args)
            continue
        if collective_of(value) is not None and not others:
            point = graph.inserting_before(late[0]) if late else graph.inserting_after()
        else:
            point = graph.inserting_after(max([part.clear, value, *others], key=lambda each: order.get(each, 0)))
        with point:
            part.nodes[slot] = graph.call_function(Tensor.add_ if is_own else torch.add, (total, value))
        for each in late:
            each.replace_input_with(value, part.nodes[slot])


def with_takers(part: PartGraph, gradients: Mapping[int, tuple[int, int]], takers: int) -> None:
    """Pass gradients to a function as soon as they are computed, in place of copying them to the tier below.

    ``gradients``: by index of the program's outputs, the slots of the gradient and of its parameter. ``takers``: the
    slot of the function. It may write the parameter, so it is called once the last copy of that has been fetched.
    """
    graph, taker = part.graph, part.read(takers)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for output, (slot, parameter) in gradients.items():
        copy = part.nodes.pop(slot)
        assert not copy.users, copy.format_node()
        gradient: Any = copy.args[1]
        fetches = part.nodes[parameter].users if parameter in part.nodes else ()
        last = max([copy, *(_first_reader(each, order) for each in fetches)], key=order.__getitem__)
        with graph.inserting_after(last):
            taken = graph.call_function(_take, (taker, output, *gradient))
        part.places[taken.name] = part.places[copy.name]
        graph.erase_node(copy)


def _first_reader(start: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    """The first call that reads the result of a transfer; the transfer is done by then."""
    return min(start.users, key=order.__getitem__)


def _take(taker: Taker, output: int, gradient: Tensor) -> None:
    taker(output, gradient)


def with_buffers(graph: fx.Graph) -> None:
    """Write large products whose only reader is the all_reduce of a bucket directly to their places in its buffer."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for start in list(graph.nodes):
        collective = collective_of(start)
        if collective is None or collective.layout is None or collective.kind != "all_reduce":
            continue
        operands = dict(enumerate(column[0] for column in start.args[1:]))
        shapes = collective.layout.shapes
        large = {
            i: each
            for i, each in operands.items()
            if each.target in PRODUCTS and math.prod(shapes[i]) >= LARGE_PRODUCT
            if len(each.users) == 1 and list(operands.values()).count(each) == 1
        }
        if not large:
            continue
        first = min(large.values(), key=order.__getitem__)
        with graph.inserting_before(first):
            made = graph.call_function(collective.layout.places, (first.args[-1],))
            buffer, pieces = (graph.call_function(operator.getitem, (made, i)) for i in range(2))
        for i, each in large.items():
            with graph.inserting_before(each):
                piece = graph.call_function(operator.getitem, (pieces, i))
                each.kwargs = {"out": graph.call_method("view", (piece, shapes[i]))}
        with graph.inserting_before(start):
            if others := {i: each for i, each in operands.items() if i not in large}:
                places = [graph.call_function(operator.getitem, (pieces, i)) for i in others]
                graph.call_function(put, (places, list(others.values())))
        start.target, start.args = collective.start_packed, (start.args[0], [buffer])


def with_waits(graph: fx.Graph) -> dict[str, str]:
    """Insert a wait for each collective before its first reader. Returns the collective of each wait, by names.

    At most ``MOST_UNDER_WAY`` are in flight of reduce_scatters over the same axes, and of copies of saved values to the
    tier below: their operands, which are larger than the results on the device, live until they are done.
    """
    started, waits = dict[fx.Node, None](), dict[str, str]()
    latest: dict[tuple[str, ...], list[fx.Node]] = {}  # the last reduce_scatters by axes; saves have no axes
    for node in list(graph.nodes):
        due = set(started) if node.op == "output" else set(node.all_input_nodes)
        collective = collective_of(node)
        if collective is not None and (most := MOST_UNDER_WAY.get(collective.kind)):
            before = latest.get(collective.axes, [])
            due.update(before[: 1 - most])
            latest[collective.axes] = [*before[1 - most :], node]
        for each in [start for start in started if start in due]:
            del started[each]
            with graph.inserting_before(node):
                wait = graph.call_function(operator.call, (each,))
                value = graph.call_function(operator.getitem, (wait, 0))
            each.replace_all_uses_with(value)
            wait.args = (each,)
            waits[wait.name] = each.name
        if collective is not None:
            started[node] = None
    return waits


def with_ranges(graph: fx.Graph, places: Mapping[str, Place]) -> None:
    """Add a profiler range for each call of a program; for a collective one for its start and one for its wait."""
    seen = set[Place]()
    for node in reversed(graph.nodes):
        place = places.get(node.name)
        is_wait = node.target is operator.call
        if place is not None and place.name and (is_wait or place not in seen):
            seen |= set() if is_wait else {place}
            node.target, node.op = _ranged(_function(node), place.name + WAIT * is_wait), "call_function"


def _ranged(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return kernel(*args, **kwargs)

    return ranged


def _function(node: fx.Node) -> Any:
    return getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target


def over_ranks(graph: fx.Graph, count: int) -> None:
    """Make each value a list with an entry for each of ``count`` ranks: ops run rank after rank.

    A collective takes these lists in place of lists with one rank's operands.
    """
    values, comm, *nodes = graph.nodes
    for node in nodes:
        if node.target is operator.call:
            (own,) = node.users  # the result of one rank
            own.replace_all_uses_with(node)
            graph.erase_node(own)
            nodes.remove(own)
        elif collective_of(node) is not None:
            node.args = (comm, *(column[0] for column in node.args[1:]))
        elif node.op != "output" and values not in node.args:
            args = [_over_ranks(arg, node, count) for arg in (*node.args, *node.kwargs.values())]
            kernel = _with_names(_function(node), tuple(node.kwargs)) if node.kwargs else _function(node)
            node.op, node.target, node.kwargs = "call_function", _each(kernel, args, count), {}
            node.args = tuple(arg for arg in args if isinstance(arg, fx.Node))


def _over_ranks(argument: Any, node: fx.Node, count: int) -> Any:
    """The argument of a node for all ranks: a list with nodes becomes a node that makes that list for each rank."""
    if not isinstance(argument, (list, tuple)):
        return argument
    make = tuple if isinstance(argument, tuple) else list
    entries = [_over_ranks(entry, node, count) for entry in argument]
    if not any(isinstance(entry, fx.Node) for entry in entries):
        return make(entries)
    with node.graph.inserting_before(node):
        lists = tuple(entry for entry in entries if isinstance(entry, fx.Node))
        return node.graph.call_function(_each(lambda *row: make(row), entries, count), lists)


def _each(kernel: Callable[..., Any], args: Sequence[Any], count: int) -> Callable[..., list[Any]]:
    """A function that calls the kernel for each rank. It takes a list of all ranks for each node among ``args``."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, fx.Node)]
    columns: list[Any] = [repeat(arg) for arg in args]

    def each(*lists: Sequence[Any]) -> list[Any]:
        own = columns.copy()
        for i, values in zip(places, lists, strict=True):
            own[i] = values
        return list(map(kernel, *own)) if lists else [kernel(*args) for _ in range(count)]

    return each


def _with_names(kernel: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The kernel as a function whose last arguments are passed on under ``names``."""

    def named(*args: Any) -> Any:
        split = len(args) - len(names)
        return kernel(*args[:split], **dict(zip(names, args[split:], strict=True)))

    return named
