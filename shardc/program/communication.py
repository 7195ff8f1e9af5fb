"""Nodes that communicate: collectives, buckets, exchanges with neighbours; what each sends, and where it may move."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from shardc.language.machine import LOCAL_KINDS, CollectiveKind
from shardc.language.mesh import axis_of
from shardc.language.sharding import TensorType, dtype_name
from shardc.language.windows import most_rows_sent, overlap_add
from shardc.ops.attention.ring import Ring, ring_bytes
from shardc.ops.attention.rules import RINGS, ring_attention_backward
from shardc.ops.contraction import DOT_RINGS, gather_dots
from shardc.ops.piece import fit
from shardc.ops.tier import fetch, offload
from shardc.program.coding.nodes import CODINGS, adds_state, codec_name, is_decode, is_encode, is_step, state_of
from shardc.program.collective import (
    COLLECTIVES,
    EXCHANGES,
    Collective,
    adds_microbatches,
    group_size,
    payload_numel,
    rechunked_numel,
    saved_slice,
    wire_bytes,
    wire_bytes_total,
)
from shardc.program.node import ancestors, descendants, is_free, is_getitem, operand, operands
from shardc.program.program import Program, ends_of, parameters_of

Size = Any  # an int; a sympy.Expr where sizes have names
RowCount = Callable[[tuple[Any, ...]], tuple[Size, Size]]  # counts rows of an exchange, like ``most_rows_sent``
LARGE_PRODUCT = 1 << 16  # elements; a smaller product is not worth a view of its place in a bucket's buffer


def bucket(kind: CollectiveKind, axes: tuple[str, ...], args: tuple[tuple[Any, ...], ...], *xs: Any) -> tuple[Any, ...]:
    """Several collectives of one kind, sent as one over a flat buffer. ``args``: the further arguments of each.

    Like its members it is the identity on global values.
    """
    return xs


@dataclass(frozen=True, slots=True)
class Member:
    """One collective of a node: of ``operand``, with ``args`` after it, to the node's result at ``index``."""

    kind: CollectiveKind
    args: tuple[Any, ...]
    operand: fx.Node
    index: int


def kind_of(node: fx.Node) -> CollectiveKind | None:
    """The kind of the collectives of a node; None if it has none."""
    target, args = cast(Any, node.target), cast(Any, node.args)
    if isinstance(target, torch._ops.OpOverload):  # none of torch's ops is one, and their hashes are slow
        return None
    return args[0] if target is bucket else COLLECTIVES.get(target)


def members(node: fx.Node) -> tuple[Member, ...]:
    """The collectives of a node: itself, the members of a bucket, or none."""
    kind, node_args = kind_of(node), cast(Any, node.args)
    if kind is None:
        return ()
    if node.target is not bucket:
        return (Member(kind, node_args[1:], node_args[0], 0),)
    _, axes, args, *operands = node_args
    pairs = enumerate(zip(args, operands, strict=True))
    return tuple(Member(kind, (axes, *rest), operand, i) for i, (rest, operand) in pairs)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The mesh axes along which ranks exchange values in a node; empty if it sends nothing."""
    sent = [part for part in members(node) if part.kind not in LOCAL_KINDS]
    parts = [axes for part in sent for axes in part.args[: 2 if part.kind == "collective_permute" else 1]]
    parts += [node.args[1]] if node.target in EXCHANGES else []
    return tuple(dict.fromkeys(axis_of(part) for axes in parts for part in axes))


def set_operand(node: fx.Node, member: Member, operand: fx.Node) -> None:
    """Give a member another operand."""
    args = list(node.args)
    args[3 + member.index if node.target is bucket else 0] = operand
    node.args = tuple(args)


def results(node: fx.Node, member: Member) -> Iterator[fx.Node]:
    """The nodes that hold a member's result."""
    if node.target is not bucket:
        yield node
        return
    yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == member.index)


def values_sent(node: fx.Node) -> list[fx.Node]:
    """The values that a collective moves; if it sends codes, the values that were encoded."""
    parts = members(node)
    if not is_encode(parts[0].operand):
        return [part.operand for part in parts]
    encoded = [each for each in parts[0].operand.args if isinstance(each, fx.Node)]
    return values_sent(operand(encoded[0], -1)) if is_step(encoded[0]) else encoded


def values_received(node: fx.Node) -> list[fx.Node]:
    """The nodes of a collective's results; if it sends codes, those of the values that are decoded in the end."""
    parts = members(node)
    if not is_encode(parts[0].operand):
        return [next(results(node, part), node) for part in parts]
    (reader,) = node.users
    if is_step(reader):
        codes = next(filter(is_encode, reader.users))
        return values_received(next(filter(members, codes.users)))
    picked = {user.args[1]: user for user in reader.users if is_getitem(user)}
    return [picked.get(i, reader) for i in range(len(values_sent(node)))]


def is_sent(node: fx.Node) -> bool:
    """Whether a node is a collective between ranks, even if it is over microbatches or has nothing to send."""
    return any(part.kind not in LOCAL_KINDS for part in members(node)) or node.target in EXCHANGES


def is_collective(node: fx.Node, count_rows: RowCount = most_rows_sent) -> bool:
    """Whether ranks send bytes in a node; ``count_rows`` counts the rows that neighbours exchange."""
    parts = members(node)
    if parts:
        return parts[0].kind not in LOCAL_KINDS and not adds_microbatches(node)
    if node.target not in EXCHANGES or not node.args[1]:
        return False
    if node.target in DOT_RINGS:
        return True
    ring = ring_of(node)
    return ring.steps != 0 if ring else count_rows(node.args[3])[0] != 0  # type: ignore[arg-type]


def collective_at(program: Program, node: fx.Node, count_rows: RowCount = most_rows_sent) -> Collective:
    """The record of a node that is a collective: its types, bytes, source and causes."""
    assert program.mesh is not None
    parts = members(node)
    operands: list[fx.Node] = [part.operand for part in parts] or [node.args[0]]  # type: ignore[list-item]
    moved = values_sent(node) if parts else operands
    before = joined_type([program.local_type(each) for each in operands])
    after = joined_type([program.local_type(node, i) for i in range(len(operands))])
    kind: CollectiveKind = "collective_permute"
    args: tuple[Any, ...] = parts[0].args if parts else node.args[1:]
    ranks, steps = 0, 1
    if ring := ring_of(node):
        before = after = joined_type([program.local_type(each) for each in goes_round(node)])
        steps = ring.steps
        chunks = [type_ for each in goes_round(node)[:2] if (type_ := program.local_type(each))]
        payload = wire = ring_bytes(ring, *chunks, is_backward=node.target is ring_attention_backward)
    elif node.target in DOT_RINGS:
        before = after = joined_type([program.local_type(travelling(node))])
        steps = num_chunks(program, node) - 1
        payload = wire = steps * before.nbytes
    elif not parts:  # of an exchange with neighbours
        dim, values = node.args[2:4]
        sends, receives = count_rows(values)  # type: ignore[arg-type]
        if node.target is overlap_add:
            sends, receives = receives, sends
        row = before.dtype.itemsize * math.prod(size for i, size in enumerate(before.shape) if i != dim)
        payload, wire = max(sends, receives) * row, sends * row
    elif parts[0].kind == "rechunk":
        payload, wire = (n * before.dtype.itemsize for n in rechunked_numel(args, before.shape))
    else:
        kind = parts[0].kind
        ranks = group_size(program.mesh, kind, args)
        payload = sum(_payload(program, node, part, ranks) for part in parts)
        wire = wire_bytes(kind, payload, ranks)
    total = wire_bytes_total(program.mesh, parts[0].kind if parts else EXCHANGES[node.target], args, wire)  # type: ignore[index]
    sources = [program.source(each).location for each in (moved if len(moved) > 1 else [node])]
    return Collective(
        kind, args[0], dtype_name(after.dtype), before.shape, after.shape, payload, wire, total, name=node.name,
        phase=program.source(node).phase, node=", ".join(each.name for each in moved),
        source=", ".join(dict.fromkeys(filter(None, sources))), causes=program.causes(node), ranks=ranks, steps=steps,
        codec=codec_name(operands[0]),
    )  # fmt: skip


def ring_of(node: fx.Node) -> Ring | None:
    """The ring of an attention node; None for a node that is no ring."""
    values: Any = node.args[3] if node.target in RINGS else None
    return None if values is None else Ring(*values)


def goes_round(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a ring sends from rank to rank: keys and values, in backward twice, for their gradients too."""
    is_forward = node.target is not ring_attention_backward
    keys_and_values: Any = node.args[4:6] if is_forward else node.args[5:7]
    return keys_and_values if is_forward else (*keys_and_values, *keys_and_values)


def num_chunks(program: Program, node: fx.Node) -> int:
    """The number of chunks in a ring of products, one for each rank."""
    assert program.mesh is not None
    return group_size(program.mesh, "all_gather", node.args[1:])


def local_types(program: Program, node: fx.Node) -> tuple[list[TensorType], list[TensorType]]:
    """The types on one rank of the operands and of the results of a ring of products."""
    read = [program.local_type(each) for each in operands(node) if each is not None]
    made = [program.local_type(node, i) for i in range(len(program.types(node)))]
    return [each for each in read if each is not None], [each for each in made if each is not None]


def travelling(node: fx.Node) -> fx.Node:
    """The value whose chunks go from rank to rank in a ring of products: the gathered operand, or the sum."""
    return operand(node) if node.target is gather_dots else node


def _payload(program: Program, node: fx.Node, part: Member, count: int) -> int:
    """Bytes of the larger of a member's local operand and result, padding included."""
    before, after = program.local_type(part.operand), program.local_type(node, part.index)
    assert before is not None and after is not None, node
    if part.kind == "mask_padding":
        return before.nbytes
    return payload_numel(part.kind, part.args, count, before.shape, after.shape) * after.dtype.itemsize


def joined_type(types: Sequence[TensorType | None]) -> TensorType:
    """The type of a flat buffer of values; for one value its own type."""
    (first, *others) = (type_ for type_ in types if type_ is not None)
    return TensorType((sum(type_.numel for type_ in (first, *others)),), first.dtype) if others else first


def bytes_sent(program: Program, node: fx.Node) -> int:
    """The bytes that one rank sends in a collective."""
    return collective_at(program, node).wire_bytes


MAX_CHAIN = 3  # ops between an input and its gather, or between two gathers of it: a cast, views
MAX_GATHERS = 2  # one after another, over the slow axes of ZeRO and then over its fast ones


def is_early(node: fx.Node) -> bool:
    """Whether a node only fetches an input, or gathers inputs a few ops after them: it could be the first call."""
    return is_fetch(node) or (_gathers(node) and None not in _chains(node))


def is_fetch(node: fx.Node) -> bool:
    """Whether a node fetches a parameter or a saved value from the tier below."""
    return node.target is fetch


def is_saved(node: fx.Node) -> bool:
    """Whether a node is the result of the option ``saved``: a saved piece of a value, or a copy in the tier below."""
    return node.target is saved_slice or (node.target is offload and len(node.args) > 1)


def is_gathered_early(node: fx.Node) -> bool:
    """Whether a node's results are gathered inputs, or values decoded from such a gather."""
    codes = node.args[-1] if is_decode(node) else None
    return is_early(node) or (isinstance(codes, fx.Node) and is_early(codes))


def gathered_again(node: fx.Node) -> list[fx.Node]:
    """The gathers that read what an early node has fetched or gathered."""
    return list(filter(_gathers, final_readers(node))) if is_early(node) else []


def final_readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that compute with a node's results, or send them: its readers behind views, getitems and codes."""
    found, to_follow = dict[fx.Node, None](), [node]
    for each in to_follow:
        for user in each.users:
            if is_free(user) or user.target in CODINGS:
                to_follow.append(user)
            else:
                found[user] = None
    return list(found)


def _gathers(node: fx.Node) -> bool:
    return kind_of(node) == "all_gather"


def chain(node: fx.Node) -> list[fx.Node] | None:
    """The ops from inputs to a value, in order; None if they are too many, or some have several operands.

    The ops before an earlier gather, and those from several inputs to their codes, are counted separately.
    """
    return _Chains().to(node)


def _chains(node: fx.Node) -> list[list[fx.Node] | None]:
    """The chain of each value that an early node gathers."""
    chains = _Chains()
    return [chains.to(part.operand) for part in members(node)]


class _Chains:
    """Finds chains to values. State: ``known``, those found so far: all values of a bucket may come through another."""

    def __init__(self) -> None:
        self.known: dict[tuple[fx.Node, int, int], list[fx.Node] | None] = {}

    def to(self, node: fx.Node, most: int = MAX_CHAIN, gathers: int = MAX_GATHERS - 1) -> list[fx.Node] | None:
        """The chain to a value, with at most ``most`` ops after the last gather, and at most ``gathers`` gathers."""
        key = (node, most, gathers)
        if key not in self.known:
            self.known[key] = self._found(*key)
        return self.known[key]

    def _found(self, node: fx.Node, most: int, gathers: int) -> list[fx.Node] | None:
        if node.op == "placeholder" or is_saved(node):
            return []
        if node.op != "call_function":
            return None
        is_sent = _gathers(node)
        if is_encode(node) or (is_sent and gathers > 0):
            chains = [self.to(each, gathers=gathers - is_sent) for each in node.all_input_nodes]
            return None if None in chains else [*dict.fromkeys(op for each in chains for op in each or ()), node]
        if kind_of(node) is not None or len(node.all_input_nodes) != 1:
            return None
        is_received = (
            is_fetch(node)
            or is_decode(node)
            or (is_getitem(node) and (_gathers(operand(node)) or is_decode(operand(node))))
        )
        if not is_received and (most == 0 or is_getitem(node)):
            return None
        before = self.to(node.all_input_nodes[0], most - (not is_received), gathers)
        return None if before is None else [*before, node]


def move_before(place: fx.Node, node: fx.Node) -> None:
    """Move the operands of an early gather before another node, unless they are there already."""
    for each in dict.fromkeys(op for ops in _chains(node) for op in ops or ()):
        if place < each:
            place.prepend(each)


def layer(program: Program, node: fx.Node) -> str:
    """The layer that reads a gather: the path of the first user's module up to its first number, or its first name.

    Empty for copies that are kept between steps, which are all alive at once.
    """
    if program.source(node).phase == "update":
        return ""
    module = program.source(node).module or program.source(min(node.users, default=node)).module
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
    return numbered[0] if numbered else module.partition(".")[0]


def deferrable(program: Program) -> frozenset[fx.Node]:
    """The calls that may run once for several backwards, on the sums of their operands over these backwards.

    They are the ``all_reduce``s whose results reach only gradients of parameters, through linear ops, and those ops.
    Under stage 1 of ``Zero`` a ``reduce_scatter`` may wait too; in other stages it makes a gradient smaller at once. If
    gradients are offloaded, no sum may wait, since the device has no room for it. Residuals and momenta are added to
    such sums, and what codes leave out of them is computed with them.
    """
    zero = program.options.zero
    if zero is not None and zero.stage != 1 and program.options.offloaded is not None:
        return frozenset()
    kinds = {"all_reduce", "reduce_scatter"} if zero is not None and zero.stage == 1 else {"all_reduce"}
    closed = _closed(program, {node for node in only_to_gradients(program) if _reduces(node, kinds)})
    beside = {each for node in closed for each in state_of(node) if each.op == "call_function"}
    return frozenset(closed | ancestors(*beside))


def _reduces(node: fx.Node, kinds: Collection[str]) -> bool:
    """Whether a node begins a sum over ranks of one of these kinds."""
    if adds_state(node):
        return any(_reduces(user, kinds) for user in node.users)
    if is_encode(node):
        return node.args[0] in kinds
    parts = members(node)
    return bool(parts) and all(part.kind in kinds and part.args[1] == "sum" for part in parts)


def only_to_gradients(program: Program) -> set[fx.Node]:
    """The calls whose results reach gradients of parameters, through linear ops, and nothing else."""
    parameters, ends = set(parameters_of(program).values()), list(ends_of(program))
    residuals = {node for output, _, node in ends if output.kind == "residual"}
    others = {node for output, owner, node in ends if output.kind != "gradient" or owner not in parameters} - residuals
    gradients = {node for *_, node in ends} - others  # results that are gradients of parameters and nothing else
    linear: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        users = set(node.users) - {program.output_node}
        is_result = program.output_node in node.users
        if node.op == "call_function" and users <= linear and (node in gradients or not is_result):
            if _is_linear(program, node):
                linear.add(node)
    return linear


def _is_linear(program: Program, node: fx.Node) -> bool:
    if is_getitem(node) or node.target is fit or node.target in CODINGS:
        return True
    if parts := members(node):
        return all(part.kind != "mask_padding" and part.args[1] not in ("max", "min") for part in parts)
    if node.target in EXCHANGES:
        return False  # its rule cannot be bound to local types
    present = frozenset(i for i, operand in enumerate(operands(node)) if operand is not None)
    return present in program.rule(node).linear


def _closed(program: Program, reductions: set[fx.Node]) -> set[fx.Node]:
    """The reductions and all ops after them, without reductions that lead to an op with an operand from elsewhere."""
    while True:
        reached = {node: descendants(node) - {program.output_node} for node in reductions}
        closed = set().union(*reached.values())
        joined = {each for each in closed - reductions if set(each.all_input_nodes) - closed - set(state_of(each))}
        if not joined:
            return closed
        reductions = {node for node in reductions if not reached[node] & joined}
