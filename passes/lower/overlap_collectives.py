"""overlap_collectives: lowered -> lowered. Independent work is put between a collective and its first reader.

::

    x = dot(dy, w)                                x = dot(dy, w)
    g = dot(dy, a)                     ->         r = all_reduce(x, ("tp",), "sum")
    r = all_reduce(x, ("tp",), "sum")             g = dot(dy, a)
    z = relu(r)                                   z = relu(r)

The executor starts a collective where it stands and waits at its first reader. In backward, calls that no such reader
needs, such as gradients of weights, are put off until something waits. Then all of them run, so that no value is kept
longer than from one collective to the next. Views of a collective's result move to the first call that computes with
them.

A layer's parameters are gathered one layer ahead, so that two layers' parameters are whole at a time::

    b = all_gather(u, ("dp",), 0)                 b = all_gather(u, ("dp",), 0);  c = all_gather(d, ("dp",), 0)
    y = dot(x, b)                      ->         y = dot(x, b)
    c = all_gather(d, ("dp",), 0)
    z = dot(y, c)                                 z = dot(y, c)

A gradient goes to the tier below once the next ones are on their way. Sums of one number that depend only on inputs,
such as the number of targets that count, start before all else.

Invariant: only the order changes, and that of collectives is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from typing import Any

from torch import fx

from shardc.costs.count import flops_of_call
from shardc.language.machine import LOCAL_KINDS
from shardc.ops.tier import offload
from shardc.program.coding.nodes import CODINGS, is_encode
from shardc.program.collective import GO_ROUND, group_size
from shardc.program.communication import (
    bucket,
    final_readers,
    gathered_again,
    is_collective,
    is_early,
    is_fetch,
    layer,
    members,
    move_before,
)
from shardc.program.lifetime import owners_of, split
from shardc.program.node import ancestors, descendants, is_free, is_getitem, is_view, operand
from shardc.program.program import Program


def overlap_collectives(program: Program) -> Program:
    """The program in another order."""
    program = program.edited()
    _count_first(program)
    parts = split(program)
    order = _offload_soon(_in_turn(_put_off(parts.backward)))
    if order != list(parts.backward):
        for node in order:  # nothing before backward reads its results
            program.output_node.prepend(node)
    order = _in_turn(parts.update)
    if order != list(parts.update):
        for node in reversed(order):  # the update part reads only inputs
            program.placeholders[-1].append(node)
    readers, parts = _first_readers(program), split(program)
    for part in (parts.forward, parts.backward):
        # A layer's gathers start right before the layer before it reads its own. Gathers that stood earlier move there
        # too, so that only two layers' parameters are whole at a time, in any number of buckets. The operands of
        # gathers are fetched one layer earlier.
        early = [node for node in part if is_early(node) and readers.get(node, program.output_node).op != "output"]
        gathers = [(_reader_in_the_end(readers, node), node) for node in early]
        layers = [list(group) for _, group in groupby(sorted(gathers), lambda pair: layer(program, pair[1]))]
        places = [group[0][0] for group in layers]
        for i, group in enumerate(layers[1:]):
            for _, node in group:
                place = places[max(0, i - 1) if is_fetch(node) and gathered_again(node) else i]
                if not any(each < place for each in gathered_again(node)):
                    move_before(place, node)
                    place.prepend(node)
    for node in filter(is_free, readers):
        _reader_now(readers, node).prepend(node)
    return program


def _first_readers(program: Program) -> dict[fx.Node, fx.Node]:
    """By collective, and by view of its results, in order: the first call that computes with these results.

    It is the output if they are only returned. Collectives in groups of one rank are left out.
    """
    views: dict[fx.Node, None] = {}  # collectives and views of their results, in order
    for node in program.graph.nodes:
        if _sends(program, node) or (is_free(node) and not views.keys().isdisjoint(node.all_input_nodes)):
            views[node] = None
    owners = owners_of(program, views)
    copies = {node for node in views if is_view(node) and owners[program.value(node)][0] is node}
    readers: dict[fx.Node, fx.Node] = {}
    for node in reversed(views):
        ways = (readers[user] if is_free(user) and user not in copies else user for user in node.users)
        readers[node] = min(ways, default=program.output_node)
    return {node: readers[node] for node in views if node not in copies}


def _reader_now(readers: Mapping[fx.Node, fx.Node], view: fx.Node) -> fx.Node:
    """The first call that computes with a view, in the present order: its first reader may be a gather that moved."""
    if not view.users or readers[view].op == "output":
        return readers[view]
    return min(_reader_now(readers, user) if is_free(user) and user in readers else user for user in view.users)


def _reader_in_the_end(readers: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """The first call that computes with the value that a node gathers, after any further gathers of it."""
    further = {each for each in gathered_again(node) if each in readers}
    if not further:
        return readers[node]
    return min(_reader_in_the_end(readers, each) if each in further else each for each in final_readers(node))


def _sends(program: Program, node: fx.Node) -> bool:
    """Whether a call is an exchange of more than one rank, a bucket of them, or a fetch.

    A ring does not count, since it ends within its call.
    """
    parts = members(node)
    mesh: Any = program.mesh
    is_of_one_rank = bool(parts) and group_size(mesh, parts[0].kind, parts[0].args) == 1
    return (
        node.target is bucket
        or is_fetch(node)
        or (is_collective(node) and not is_of_one_rank and node.target not in GO_ROUND)
    )


def _count_first(program: Program) -> None:
    """Start sums of one number that need no parameter and no product before all else, with the calls they need.

    In a pipeline they are known before the first microbatch.
    """
    stored = {node for node, put in zip(program.placeholders, program.inputs, strict=True) if put.kind != "input"}
    forward = split(program).forward
    single = [node for node in forward if not program.has_many(node) and not program.type(node).shape]
    early = set[fx.Node]()
    for needed in map(ancestors, filter(_is_sent, single) if program.num_stages == 1 else ()):
        if stored.isdisjoint(needed) and not any(flops_of_call(program, node) for node in needed & set(forward)):
            early |= needed
    place = next((node for node in forward if node not in early), None)
    for node in forward:
        if place is not None and node in early and place < node:
            place.prepend(node)


def _put_off(part: Sequence[fx.Node]) -> list[fx.Node]:
    """The order in which calls that no collective needs run while one is under way, and before a ring at the latest."""
    within = set(part)
    waited = {node for node in part if _is_sent(node) and _is_awaited(node, within)}
    urgent = ancestors(*waited)
    order: list[fx.Node] = []
    later: list[fx.Node] = []
    pending: set[fx.Node] = set()  # calls that are put off, and collectives under way
    for node in part:
        is_urgent = node in urgent
        if is_urgent and (node.target in GO_ROUND or not pending.isdisjoint(node.all_input_nodes)):
            order += later
            later, pending = [], set()
        (order if is_urgent else later).append(node)
        if node in waited or not is_urgent:
            pending.add(node)
    return order + later


def _in_turn(part: Sequence[fx.Node]) -> list[fx.Node]:
    """The order in which codes that nothing awaits before the end are on their way while others are made.

    Work on codes that have arrived comes after the next ones are sent, step by step: a sum and its sending, then its
    decoding.
    """
    place, steps = {node: i for i, node in enumerate(part)}, dict[fx.Node, list[list[fx.Node]]]()
    later: dict[fx.Node, fx.Node] = {}  # by call that comes later, the sending that it follows
    for node in part:
        if node not in later and _sends_codes(node) and not _is_awaited(node, place.keys()):
            after = descendants(node) & place.keys() - {node}
            others = {each for call in after for each in call.all_input_nodes} - after
            if after.isdisjoint(later) and all(place.get(each, -1) <= place[node] for each in others):
                steps[node] = [[]]
                later.update(dict.fromkeys(after, node))
    for node in part:
        if node in later:
            steps[later[node]][-1].append(node)
            if _sends_codes(node):
                steps[later[node]].append([])
    order: list[fx.Node] = []
    under_way: list[list[list[fx.Node]]] = []
    for node in part:
        if node not in later:
            order.append(node)
        if node in steps:
            order += _next_steps(under_way)
            under_way.append(steps[node])
    while any(under_way):
        order += _next_steps(under_way)
    return order


def _next_steps(under_way: Sequence[list[list[fx.Node]]]) -> list[fx.Node]:
    """Take out the next step of each sending under way."""
    return [node for steps in under_way if steps for node in steps.pop(0)]


def _offload_soon(order: Sequence[fx.Node]) -> list[fx.Node]:
    """The order in which a gradient is offloaded right after the next collective has started."""
    within, offloads = set(order), dict[fx.Node, list[fx.Node]]()
    for node in order:
        if node.target is offload and operand(node) in within:
            offloads.setdefault(operand(node), []).append(node)
    copies = {node for nodes in offloads.values() for node in nodes}
    soon, waiting = list[fx.Node](), list[fx.Node]()
    for node in (each for each in order if each not in copies):
        soon.append(node)
        if _is_sent(node) or node.target is bucket:
            soon += waiting
            waiting = []
        waiting += offloads.get(node, ())
    return soon + waiting


def _sends_codes(node: fx.Node) -> bool:
    return bool(members(node)) and node.target is not bucket and is_encode(members(node)[0].operand)


def _is_awaited(node: fx.Node, within: Set[fx.Node]) -> bool:
    """Whether a call other than those on codes reads the value that is sent, or the decoded one."""
    for user in within & node.users.keys():
        if user.target is offload:
            continue
        is_on_the_way = user.target in CODINGS or _sends_codes(user) or (is_getitem(user) and node.target in CODINGS)
        if not is_on_the_way or _is_awaited(user, within):
            return True
    return False


def _is_sent(node: fx.Node) -> bool:
    """Whether a call exchanges data on some mesh; the order of the program is the same on every mesh."""
    return node.target is not bucket and any(part.kind not in LOCAL_KINDS for part in members(node))
