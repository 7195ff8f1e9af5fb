"""Lifetimes: the part of a program in which an op runs, the memory that values share, and when it may be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import num_shards
from shardc.ops.attention.rules import RINGS
from shardc.ops.contraction import DOT_RINGS, dot
from shardc.ops.index import MAKE_NEW, lookup_rows, scatter_rows
from shardc.ops.tier import TRANSFERS, offload
from shardc.program.coding.nodes import CODINGS, is_decode, residuals_before
from shardc.program.collective import COLLECTIVES, EXCHANGES, collective_kind, group_size, reshard
from shardc.program.communication import bucket, is_saved
from shardc.program.inference import Layout, Layouts, result_layouts
from shardc.program.node import ancestors, is_annotation, is_getitem, operand, takes_device
from shardc.program.program import Program, Value, parameters_of

MOVES: set[Any] = {*COLLECTIVES, *EXCHANGES, *CODINGS, *TRANSFERS, bucket, reshard}  # their results are new
OF_FORWARD = ("output", "buffer", "changed", "guard")
PART_OF = {"computed": "update", **dict.fromkeys(OF_FORWARD, "forward"), "gradient": "backward", "residual": "backward"}


def is_row_of_kept(program: Program, name: str, stored: fx.Node, kept: fx.Node) -> bool:
    """Whether a stored parameter is rows of its own gathered copy, which is kept, and so shares its memory.

    It is not if it is offloaded, or if the copy was sent in codes or has padded rows.
    """
    if program.options.offloaded is not None:
        return False
    dims, local_type = program.sharding(stored).dims, program.local_type(stored)
    shape = program.global_type(stored).shape
    is_same = program.type(stored).dtype == program.type(kept).dtype and bool(shape)
    if not is_same or dims[1:] != program.computed[name].dims[1:] or is_decode(program.value(kept)[0]):
        return False
    assert local_type is not None
    pieces = zip(dims[1:], local_type.shape[1:], shape[1:], strict=True)
    return all(piece * num_shards(cut.axes) == size for cut, piece, size in pieces)  # sizes may be expressions


def stored_below(program: Program) -> set[fx.Node]:
    """The values that are in the tier below the device's memory."""
    parameters = parameters_of(program).values() if program.options.offloaded is not None else ()
    return {*parameters, *program.graph.find_nodes(op="call_function", target=offload)}


@dataclass(frozen=True, slots=True)
class Parts:
    """A program's calls in the order in which they run.

    ``update``: those that ``computed`` results need; ``forward``: the further ones that outputs and buffers need, or
    that make saved pieces and copies; ``backward``: all others. A getitem is in the part of its producer.
    """

    update: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]


def split(program: Program) -> Parts:
    """The parts of a program's calls."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    update = _needed_by(program, "update", calls)
    forward = _needed_by(program, "forward", calls) - update
    backward = set(calls) - update - forward
    return Parts(*(tuple(node for node in calls if node in part) for part in (update, forward, backward)))


def _needed_by(program: Program, part: str, calls: Sequence[fx.Node]) -> set[fx.Node]:
    ends = zip(program.results, program.outputs, strict=True)
    wanted = [node for node, output in ends if node is not None and PART_OF[output.kind] == part]
    if part == "forward":
        wanted += filter(is_saved, calls)
    needed = ancestors(*wanted)
    return needed | {node for node in calls if is_getitem(node) and operand(node) in needed} if needed else needed


def owners_of(program: Program, order: Iterable[fx.Node], received: Collection[fx.Node] = ()) -> Mapping[Value, Value]:
    """For every value the one whose memory it shares: itself, or the base that it is a view of.

    The layouts of the results of the calls in ``order`` are computed, since strides decide whether a reshape is a view.
    Inputs and values ``received`` from other ranks are contiguous.
    """
    owners: dict[Value, Value] = {}
    layouts: dict[Value, Layout] = {}
    for node, i in map(program.value, (*program.placeholders, *received)):
        type_ = program.types(node)[i]
        if type_ is not None:
            owners[node, i], layouts[node, i] = (node, i), Layout.new(type_)
    for node in order:
        if is_getitem(node):
            continue
        reads: list[Value] = []  # in the order of the call's tensors
        found, is_operand = _layouts(program, node, layouts, reads)
        memory = [owners[value] for value in reads]
        for i, layout in enumerate(found):
            if layout is None:
                continue
            if is_operand:
                owner = owners[program.value(operand(node))]
            else:
                owner = (node, i) if layout.owner is None else memory[layout.owner]
            owners[node, i] = owner
            memory.append(owner)
            layouts[node, i] = layout if layout.owner is None else replace(layout, owner=None)
    return owners


def _layouts(
    program: Program, node: fx.Node, known: Mapping[Value, Layout], reads: list[Value]
) -> tuple[Layouts, bool]:
    """The layouts of a call's results, and whether it returns its operand; adds the tensors that it takes to ``reads``.

    Results that a runtime allocates are new tensors.
    """
    new = tuple([None if type_ is None else Layout.new(type_) for type_ in program.types(node)])
    target, mesh = node.target, program.mesh
    if target in MOVES:
        assert mesh is not None
        if before := residuals_before(node):
            reads += map(program.value, before)
            return tuple(replace(each, owner=i) for i, each in enumerate(new) if each is not None), False
        if target in TRANSFERS and len(node.args) > 1:  # saved, with strides as they are
            saved = known.get(program.value(operand(node)))
            return (new if saved is None else (replace(saved, owner=None),)), False
        is_of_one_rank = target in COLLECTIVES and group_size(mesh, collective_kind(node), node.args[1:]) == 1
        return ((known[program.value(operand(node))],), True) if is_of_one_rank else (new, False)
    if is_annotation(node):
        return (known[program.value(operand(node))],), True

    def layout(read: fx.Node) -> Any:
        reads.append(program.value(read))
        return known[reads[-1]]

    kwargs = dict(node.kwargs) | ({"device": "meta"} if takes_device(target) else {})
    try:
        return result_layouts(target, *fx.map_arg((node.args, kwargs), layout)), False
    except NotImplementedError:  # no kernel
        return new, False


# Aliasing according to the ops' schemas, for generated code, which reuses buffers.

aten = torch.ops.aten
NEW = {dot, lookup_rows, scatter_rows, *MAKE_NEW, *RINGS, *DOT_RINGS, *TRANSFERS}


def dies_at(value: fx.Node, reader: fx.Node, part: Mapping[fx.Node, int]) -> bool:
    """Whether the memory of a value is allocated in a part and no call reads it after ``reader`` began.

    ``part``: its calls, each with its index in the order in which they run. A sender, or a copy to the tier below, may
    read its operand later, and the result of another library's op may share its operand's memory: neither lets a value
    die.
    """
    root = allocation(value)
    others = [node for node in reader.all_input_nodes if node is not value]
    if root not in part or not is_new(root) or any(allocation(each) is root for each in others):
        return False
    aliases = [root]
    for node in aliases:  # it grows in the loop
        for user in set(node.users) - {reader}:
            if part.get(user, len(part)) > part[reader]:
                return False
            if _may_be_view(user):
                aliases.append(user)
            elif not is_new(user) or user.target is offload:
                return False
    return True


def is_whole(value: fx.Node, program: Program) -> bool:
    """Whether a value is all of its memory, each element once, and not an expanded part of it."""
    chain = view_chain(value)
    sizes = {program.value_type(program.value(each)).numel for each in chain}
    return len(sizes) == 1 and all(each.target is not aten.as_strided.default for each in chain)


def alone_in_memory(values: Sequence[fx.Node]) -> set[fx.Node]:
    """The values in memory that a call of torch allocated and that no other of ``values`` shares."""
    count = Counter(map(allocation, values))
    return {value for value in values if count[allocation(value)] == 1 and is_new(allocation(value))}


def allocation(node: fx.Node) -> fx.Node:
    """The call that allocated the memory of a value, found through views."""
    return view_chain(node)[-1]


def view_chain(value: fx.Node) -> list[fx.Node]:
    """A value, the value that it is a view of, and so on to the one that is no view."""
    chain = [value]
    while _may_be_view(chain[-1]):
        chain.append(operand(chain[-1]))
    return chain


def _may_be_view(node: fx.Node) -> bool:
    """Whether the result of a call of torch may share its first operand's memory."""
    is_of_aten = getattr(node.target, "namespace", "") == "aten"
    if not is_of_aten or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is aten._unsafe_view.default or not _allocates(node.target, 0)


def is_new(node: fx.Node) -> bool:
    """Whether a value is in memory of its own. The results of a bucket share memory on virtual ranks."""
    if is_getitem(node):
        producer, index = operand(node), node.args[1]
        twins = [user for user in producer.users if user.args[1] == index]
        return len(twins) == 1 and (producer.target in DOT_RINGS or _allocates(producer.target, index))
    return node.target in NEW or _allocates(node.target, 0)


def _allocates(target: Any, index: Any) -> bool:
    """Whether an op of torch returns a result in memory of its own."""
    if getattr(target, "namespace", "") != "aten" or target is aten._unsafe_view.default:
        return False
    returns = target._schema.returns
    return index < len(returns) and str(returns[index].type) == "Tensor" and returns[index].alias_info is None
