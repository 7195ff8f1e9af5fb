"""The nodes that communicate: a collective, a bucket of several, an exchange with neighbours; what each sends."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.language.collective_kind import LOCAL_KINDS, CollectiveKind
from shardc.language.mesh import axis_of
from shardc.language.sharding import TensorType, dtype_name
from shardc.language.windows import most_rows_sent, overlap_add
from shardc.program.collective import (
    COLLECTIVES,
    EXCHANGES,
    Collective,
    adds_microbatches,
    group_size,
    payload_numel,
    rechunked_numel,
    wire_bytes,
    wire_bytes_total,
)
from shardc.program.program import Program

Size = Any  # an int; a sympy.Expr where sizes have names
RowCount = Callable[[tuple[Any, ...]], tuple[Size, Size]]  # of the windows of an exchange: ``most_rows_sent``


def bucket(kind: CollectiveKind, axes: tuple[str, ...], args: tuple[tuple[Any, ...], ...], *xs: Any) -> tuple[Any, ...]:
    """Several collectives of one kind that go as one over a flat buffer; ``args``: the further arguments of each.

    The identity on global values, as its members are.
    """
    return xs


@dataclass(frozen=True, slots=True)
class Member:
    """One collective of a node: of ``operand``, with ``args`` after it, to the node's result at ``index``."""

    kind: CollectiveKind
    args: tuple[Any, ...]
    operand: fx.Node
    index: int


def members(node: fx.Node) -> tuple[Member, ...]:
    """The collectives of a node: itself, the members of a bucket, or none."""
    node_args: tuple[Any, ...] = node.args
    if node.target in COLLECTIVES:
        return (Member(COLLECTIVES[node.target], node_args[1:], node_args[0], 0),)
    if node.target is not bucket:
        return ()
    kind, axes, args, *operands = node_args
    pairs = enumerate(zip(args, operands, strict=True))
    return tuple(Member(kind, (axes, *rest), operand, i) for i, (rest, operand) in pairs)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The mesh axes along which ranks exchange values in a node; none where it sends nothing."""
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


def is_sent(node: fx.Node) -> bool:
    """Whether a node is a collective between ranks, one over microbatches or with nothing to send included."""
    return any(part.kind not in LOCAL_KINDS for part in members(node)) or node.target in EXCHANGES


def is_collective(node: fx.Node, count_rows: RowCount = most_rows_sent) -> bool:
    """Whether ranks send bytes in a node; ``count_rows`` counts the rows that neighbours exchange."""
    parts = members(node)
    if parts:
        return parts[0].kind not in LOCAL_KINDS and not adds_microbatches(node)
    return node.target in EXCHANGES and bool(node.args[1]) and count_rows(node.args[3])[0] != 0  # type: ignore[arg-type]


def collective_at(program: Program, node: fx.Node, count_rows: RowCount = most_rows_sent) -> Collective:
    """The record of a node that is a collective: its types, bytes, source and causes."""
    assert program.mesh is not None
    parts = members(node)
    operands: list[fx.Node] = [part.operand for part in parts] or [node.args[0]]  # type: ignore[list-item]
    before = joined_type([program.local_type(each) for each in operands])
    after = joined_type([program.local_type(node, i) for i in range(len(operands))])
    kind: CollectiveKind = "collective_permute"
    args: tuple[Any, ...] = parts[0].args if parts else node.args[1:]
    ranks = 0
    if not parts:  # of an exchange with neighbours
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
    sources = [program.source(each).location for each in (operands if node.target is bucket else [node])]
    return Collective(
        kind, args[0], dtype_name(after.dtype), before.shape, after.shape, payload, wire, total, name=node.name,
        phase=program.source(node).phase, node=", ".join(each.name for each in operands),
        source=", ".join(dict.fromkeys(filter(None, sources))), causes=program.causes(node), ranks=ranks,
    )  # fmt: skip


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
