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
    """Each of ``xs`` through a collective of this kind, whose further arguments are those of ``args`` at its place."""
    return xs


@dataclass(frozen=True, slots=True)
class Member:
    """One collective: of ``operand``, with ``args`` after the value, to the node's result at ``index``."""

    kind: CollectiveKind
    args: tuple[Any, ...]
    operand: fx.Node
    index: int


def members(node: fx.Node) -> tuple[Member, ...]:
    """The collectives that a node is: itself, those of a bucket, or none."""
    given: tuple[Any, ...] = node.args
    if node.target in COLLECTIVES:
        return (Member(COLLECTIVES[node.target], given[1:], given[0], 0),)
    if node.target is not bucket:
        return ()
    kind, axes, args, *operands = given
    pairs = enumerate(zip(args, operands, strict=True))
    return tuple(Member(kind, (axes, *rest), operand, i) for i, (rest, operand) in pairs)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The mesh axes along which ranks exchange what a node moves; none where it sends nothing."""
    sent = [part for part in members(node) if part.kind not in LOCAL_KINDS]
    given = [axes for part in sent for axes in part.args[: 2 if part.kind == "collective_permute" else 1]]
    given += [node.args[1]] if node.target in EXCHANGES else []
    return tuple(dict.fromkeys(axis_of(part) for axes in given for part in axes))


def set_operand(node: fx.Node, member: Member, operand: fx.Node) -> None:
    """Give a member another operand."""
    args = list(node.args)
    args[3 + member.index if node.target is bucket else 0] = operand
    node.args = tuple(args)


def results(node: fx.Node, member: Member) -> Iterator[fx.Node]:
    """The nodes that stand for what a member makes."""
    if node.target is not bucket:
        yield node
        return
    yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == member.index)


def is_sent(node: fx.Node) -> bool:
    """Whether ranks exchange values in a call."""
    return any(part.kind not in LOCAL_KINDS for part in members(node)) or node.target in EXCHANGES


def is_collective(node: fx.Node, count_rows: RowCount = most_rows_sent) -> bool:
    """Whether a node sends anything."""
    parts = members(node)
    if parts:
        return parts[0].kind not in LOCAL_KINDS and not adds_microbatches(node)
    return node.target in EXCHANGES and bool(node.args[1]) and count_rows(node.args[3])[0] != 0  # type: ignore[arg-type]


def collective_at(program: Program, node: fx.Node, count_rows: RowCount = most_rows_sent) -> Collective:
    """What a node sends that is a collective."""
    parts = members(node)
    moved: list[fx.Node] = [part.operand for part in parts] or [node.args[0]]  # type: ignore[list-item]
    before = joined_type([program.local_type(each) for each in moved])
    after = joined_type([program.local_type(node, i) for i in range(len(moved))])
    ranks = 0
    if node.target in EXCHANGES:
        kind: CollectiveKind = "collective_permute"
        axes: tuple[str, ...] = node.args[1]  # type: ignore[assignment]
        payload, wire = edge_bytes(node, before, count_rows)
    elif parts[0].kind == "rechunk":
        kind, axes = "collective_permute", parts[0].args[0]
        payload, wire = (n * before.dtype.itemsize for n in rechunked_numel(parts[0].args, before.shape))
    else:
        assert program.mesh is not None
        kind, axes = parts[0].kind, parts[0].args[0]
        ranks = group_size(program.mesh, kind, parts[0].args)
        payload = sum(_payload(program, node, part, ranks) for part in parts)
        wire = wire_bytes(kind, payload, ranks)
    sources = [program.source(each).location for each in (moved if node.target is bucket else [node])]
    return Collective(
        kind, axes, dtype_name(after.dtype), before.shape, after.shape,
        payload, wire, _total(program, node, parts, wire), name=node.name, phase=program.source(node).phase,
        node=", ".join(each.name for each in moved),
        source=", ".join(dict.fromkeys(filter(None, sources))), causes=program.causes(node),
        ranks=ranks,
    )  # fmt: skip


def _total(program: Program, node: fx.Node, parts: Sequence[Member], wire: int) -> int:
    assert program.mesh is not None
    if node.target in EXCHANGES:
        return wire_bytes_total(program.mesh, EXCHANGES[node.target], node.args[1:], wire)
    return wire_bytes_total(program.mesh, parts[0].kind, parts[0].args, wire)


def _payload(program: Program, node: fx.Node, part: Member, count: int) -> int:
    """Bytes of the larger of input and output of one value's part, padding included."""
    taken, made = program.local_type(part.operand), program.local_type(node, part.index)
    assert taken is not None and made is not None, node
    if part.kind == "mask_padding":
        return taken.nbytes
    return payload_numel(part.kind, part.args, count, taken.shape, made.shape) * made.dtype.itemsize


def edge_bytes(node: fx.Node, before: TensorType, count_rows: RowCount = most_rows_sent) -> tuple[Size, Size]:
    """Payload and wire bytes of an exchange with neighbours: of the rank that takes or gives most, and gives most."""
    dim, values = node.args[2:4]
    gives, takes = count_rows(values)  # type: ignore[arg-type]
    if node.target is overlap_add:
        gives, takes = takes, gives
    row = before.dtype.itemsize * math.prod(size for i, size in enumerate(before.shape) if i != dim)
    return max(gives, takes) * row, gives * row


def joined_type(types: Sequence[TensorType | None]) -> TensorType:
    """The type of a flat buffer of values; of one value its own."""
    (first, *others) = (type_ for type_ in types if type_ is not None)
    return TensorType((sum(type_.numel for type_ in (first, *others)),), first.dtype) if others else first


def bytes_sent(program: Program, node: fx.Node) -> int:
    """The bytes that one rank sends in a collective."""
    return collective_at(program, node).wire_bytes
