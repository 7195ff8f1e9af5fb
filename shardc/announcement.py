"""What a program announces of its collectives: kind, axes, bytes and cause of each, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardc.bucket import Member, bucket, members
from shardc.collective import EXCHANGES, LOCAL_KINDS, Collective, Kind, adds_microbatches, group_size, wire_bytes
from shardc.payload import payload_numel, rechunked_numel
from shardc.permutation import wire_bytes_total
from shardc.sharding import TensorType, dtype_name
from shardc.window import most_sent, moves_rows, overlap_add

if TYPE_CHECKING:
    from torch import fx

    from shardc.program import Program


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """Every collective of a lowered or localized program, in program order; what is local is none, a bucket is one.

    Of a pipeline those of each stage, with the messages that it sends.
    """
    from shardc.stage import has_stages

    if has_stages(program):
        from shardc.stage_traffic import collectives_of_stages

        return tuple(collectives_of_stages(program))
    return tuple(collective_at(program, node) for node in program.calls if is_collective(node))


def is_collective(node: fx.Node) -> bool:
    """Whether a node sends anything."""
    parts = members(node)
    return parts[0].kind not in LOCAL_KINDS and not adds_microbatches(node) if parts else moves_edges(node)


def moves_edges(node: fx.Node) -> bool:
    """Whether a node takes from neighbours, or gives to them, the edges of their chunks of a cut dim."""
    return node.target in EXCHANGES and bool(node.args[1]) and moves_rows(node.args[3])  # type: ignore[arg-type]


def bytes_sent(program: Program, node: fx.Node) -> int:
    """The bytes that one rank sends in a collective."""
    return collective_at(program, node).wire_bytes


def collective_at(program: Program, node: fx.Node) -> Collective:
    """What a node sends that is a collective."""
    parts = members(node)
    moved: list[fx.Node] = [part.operand for part in parts] or [node.args[0]]  # type: ignore[list-item]
    before = joined_type([program.local_type(each) for each in moved])
    after = joined_type([program.local_type(node, i) for i in range(len(moved))])
    ranks = 0
    if node.target in EXCHANGES:
        kind: Kind = "collective_permute"
        axes: tuple[str, ...] = node.args[1]  # type: ignore[assignment]
        payload, wire = edge_bytes(node, before)
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


def joined_type(types: Sequence[TensorType | None]) -> TensorType:
    """The type of a flat buffer of values; of one value its own."""
    (first, *others) = (type_ for type_ in types if type_ is not None)
    return TensorType((sum(type_.numel for type_ in (first, *others)),), first.dtype) if others else first


def edge_bytes(node: fx.Node, before: TensorType) -> tuple[int, int]:
    """Payload and wire bytes of an exchange with neighbours: of the rank that takes or gives most, and gives most."""
    dim, values = node.args[2:4]
    gives, takes = most_sent(values)  # type: ignore[arg-type]
    if node.target is overlap_add:
        gives, takes = takes, gives
    row = before.dtype.itemsize * math.prod(size for i, size in enumerate(before.shape) if i != dim)
    return max(gives, takes) * row, gives * row
