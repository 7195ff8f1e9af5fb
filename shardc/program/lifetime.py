"""When values live: which part of a program an op runs in, which values own their bytes, and when those die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.ops.embedding import lookup_rows, scatter_rows
from shardc.ops.index import MAKE_NEW
from shardc.program.collective import COLLECTIVES, EXCHANGES, collective_kind, group_size, reshard
from shardc.program.communication import bucket
from shardc.program.inference import is_of_torch, made_on_meta
from shardc.program.node import ancestors, is_annotation, is_getitem, operand, takes_device
from shardc.program.program import Program, Value

MOVES: set[Any] = {*COLLECTIVES, *EXCHANGES, bucket, reshard}  # what they return is a runtime's
PART_OF = {"computed": "update", **dict.fromkeys(("output", "buffer", "guard"), "forward"), "gradient": "backward"}


def is_row_of_kept(program: Program, name: str, stored: fx.Node, kept: fx.Node) -> bool:
    """Whether a parameter as it is stored shares the memory of what is kept of it: it is rows of that."""
    is_same = program.type(stored).dtype == program.type(kept).dtype and bool(program.type(stored).shape)
    return is_same and program.sharding(stored).dims[1:] == program.computed[name].dims[1:]


@dataclass(frozen=True, slots=True)
class Parts:
    """A program's calls as they run: what ``computed`` results need; what outputs and buffers need beside; the rest.

    The results of an op that has several are picked where it runs.
    """

    update: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]


def split(program: Program) -> Parts:
    """The parts of a program."""
    update = _needed_by(program, "update")
    forward = _needed_by(program, "forward") - update
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return Parts(
        tuple(node for node in calls if node in update),
        tuple(node for node in calls if node in forward),
        tuple(node for node in calls if node not in update | forward),
    )


def _needed_by(program: Program, part: str) -> set[fx.Node]:
    ends = zip(program.results, program.outputs, strict=True)
    needed = ancestors(*(node for node, output in ends if node is not None and PART_OF[output.kind] == part))
    return needed | {node for node in program.graph.nodes if is_getitem(node) and operand(node) in needed}


@dataclass(frozen=True, slots=True)
class Storage:
    """A value that owns its bytes on one rank, and the places, in the order of ``split``, where they come and go.

    Inputs are made before the program and live through it; what the program returns lives to its end. ``is_saved``:
    made by the forward part, read by the backward part.
    """

    value: Value
    nbytes: int
    born: int
    last: int
    is_saved: bool


def storages(program: Program) -> Iterator[Storage]:
    """Every value that owns its bytes; a use of a view is a use of what it looks at.

    The results of an op that has several live until the last of them is picked.
    """
    parts = split(program)
    order = [*parts.update, *parts.forward, *parts.backward]
    fwd, bwd = len(parts.update), len(order) - len(parts.backward)  # where they start
    owners = owners_of(program, order)
    last = dict.fromkeys(owners.values(), -1)
    saved: set[Value] = set()  # read by the backward part
    for place, node in enumerate(order):
        read = _results(program, operand(node)) if is_getitem(node) else map(program.value, node.all_input_nodes)
        used = [owners[value] for value in read]
        made = [owners[value] for value in _results(program, node)]
        last |= dict.fromkeys([*used, *made], place)
        saved |= set(used if place >= bwd else ())
    last |= {owners[program.value(node)]: len(order) for node in program.results if node is not None}
    born = {node: place for place, node in enumerate(order)}
    for owner, end in last.items():
        type_, start = program.local_type(*owner), born.get(owner[0], -1)
        assert type_ is not None, owner
        end = end if start >= 0 else len(order)
        yield Storage(owner, type_.nbytes, start, end, is_saved=fwd <= start < bwd and owner in saved)


def owners_of(program: Program, order: Iterable[fx.Node]) -> Mapping[Value, Value]:
    """For every value the one whose bytes it shares: itself, or what it is a view of.

    Found by running the calls of ``order`` on meta tensors, since whether a reshape is a view depends on strides.
    """
    found: dict[Value, Value] = {}
    first: dict[int, Value] = {}  # the owner of each storage, by its address
    values: dict[fx.Node, Any] = {}
    for node in (*program.placeholders, *order):
        values[node] = made = _on_meta(program, node, values)
        for result in _results(program, node):
            tensor: torch.Tensor = made[result[1]] if program.has_many(node) else made
            found[result] = first.setdefault(tensor.untyped_storage()._cdata, result)
    return found


def _results(program: Program, node: fx.Node) -> list[Value]:
    """A call's results; none of a getitem, which makes nothing."""
    types = () if is_getitem(node) else program.types(node)
    return [(node, i) for i, type_ in enumerate(types) if type_ is not None]


def _on_meta(program: Program, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a node's call returns on meta tensors; new ones where only a runtime could say."""
    if is_getitem(node):
        return values[operand(node)][node.args[1]]
    if is_annotation(node) or _stays(program, node):
        return values[operand(node)]
    if node.op == "placeholder" or node.target in MOVES:
        return _new(program, node)
    target: Any = node.target
    kwargs = dict(node.kwargs) | ({"device": "meta"} if takes_device(target) else {})
    try:
        if is_of_torch(target):
            return made_on_meta(target, node.args, kwargs, values)
        args, kwargs = fx.map_arg((node.args, kwargs), values.__getitem__)
        return target(*args, **kwargs)
    except NotImplementedError:  # no kernel
        return _new(program, node)


def _new(program: Program, node: fx.Node) -> Any:
    new = [_empty(type_) for type_ in program.types(node)]
    return tuple(new) if program.has_many(node) else new[0]


def _empty(type_: TensorType | None) -> torch.Tensor | None:
    return None if type_ is None else torch.empty(type_.shape, dtype=type_.dtype, device="meta")


def _stays(program: Program, node: fx.Node) -> bool:
    """Whether a collective has groups of one and does nothing."""
    if node.target not in COLLECTIVES:
        return False
    assert program.mesh is not None
    return group_size(program.mesh, collective_kind(node), node.args[1:]) == 1


aten = torch.ops.aten
NEW = {dot, lookup_rows, scatter_rows, *MAKE_NEW}


def dies_at(value: fx.Node, reader: fx.Node, part: Mapping[fx.Node, int]) -> bool:
    """Whether a value lies in memory that is made in a part, and no one reads while ``reader`` runs or after.

    ``part``: its calls, each with its place in the order in which they run. Someone who sends a value may still read it
    later, and what an op of another library gives may share its memory.
    """
    root = maker(value)
    if root not in part or not is_new(root) or any(maker(each) is root for each in _others(reader, value)):
        return False
    sharing = [root]
    for node in sharing:  # which grows
        for user in set(node.users) - {reader}:
            if part.get(user, len(part)) > part[reader]:
                return False
            if _is_view(user):
                sharing.append(user)
            elif not is_new(user):
                return False
    return True


def is_whole(value: fx.Node, program: Program) -> bool:
    """Whether a value is all of the memory that it lies in, each element once: not so a part of it, expanded again."""
    chain = looked_at(value)
    sizes = {program.value_type(program.value(each)).numel for each in chain}
    return len(sizes) == 1 and all(each.target is not aten.as_strided.default for each in chain)


def alone_in_memory(values: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of values that lie in memory which a call of torch made, and in which none of the others lies."""
    count = Counter(map(maker, values))
    return {value for value in values if count[maker(value)] == 1 and is_new(maker(value))}


def _others(reader: fx.Node, value: fx.Node) -> list[fx.Node]:
    return [node for node in reader.all_input_nodes if node is not value]


def maker(node: fx.Node) -> fx.Node:
    """The call that made the memory, as far as views say."""
    return looked_at(node)[-1]


def looked_at(value: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on to what made the memory."""
    chain = [value]
    while _is_view(chain[-1]):
        chain.append(operand(chain[-1]))
    return chain


def _is_view(node: fx.Node) -> bool:
    """Whether a call of torch may look at its first operand."""
    is_of_torch = getattr(node.target, "namespace", "") == "aten"
    if not is_of_torch or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is aten._unsafe_view.default or not _makes(node.target, 0)


def is_new(node: fx.Node) -> bool:
    """Whether what a call gives is in memory of its own. Virtual ranks share what a bucket makes."""
    if is_getitem(node):
        made_by, index = operand(node), node.args[1]
        twins = [user for user in made_by.users if user.args[1] == index]
        return len(twins) == 1 and _makes(made_by.target, index)
    return node.target in NEW or _makes(node.target, 0)


def _makes(target: Any, index: Any) -> bool:
    """Whether an op of torch puts a result into memory of its own."""
    if getattr(target, "namespace", "") != "aten" or target is aten._unsafe_view.default:
        return False
    returns = target._schema.returns
    return index < len(returns) and str(returns[index].type) == "Tensor" and returns[index].alias_info is None
