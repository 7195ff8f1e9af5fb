"""What a step sends: its collectives as they are listed, and how many there are of a kind, with their bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import fx

from shardc.language.kinds import LOCAL_KINDS, Kind
from shardc.language.sharding import TensorType, dtype_name
from shardc.language.text import table
from shardc.language.windows import most_rows_sent, overlap_add
from shardc.ops.windowed import fit
from shardc.program.bucket import Member, bucket, members
from shardc.program.collective import (
    COLLECTIVES,
    EXCHANGES,
    Collective,
    adds_microbatches,
    group_size,
    payload_numel,
    rechunked_numel,
    reshard,
    wire_bytes,
    wire_bytes_total,
)
from shardc.program.facts import cause_text
from shardc.program.node import descendants, is_getitem, operands
from shardc.program.program import Program, ends_of, parameters_of

Size = Any  # an int; a sympy.Expr where sizes have names
RowCount = Callable[[tuple[Any, ...]], tuple[Size, Size]]  # of the windows of an exchange: ``most_rows_sent``
_IS_ORIGIN = re.compile(r"\S+ from ").match


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind, over the same axes, in one phase: of a step on one rank, in bytes.

    ``values`` go in ``count`` collectives, which has no expression. ``wire_bytes`` are rounded down to whole ones all
    together, where each collective's own are by itself; as an expression they are not rounded.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    count: Size
    bytes: Size
    wire_bytes: Size
    values: Size = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """Phase, kind and axes as printed."""
        return self.phase, self.kind, "+".join(self.axes)


def traffic_of(collectives: Iterable[Collective]) -> list[Traffic]:
    """What collectives send together."""
    found: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for each in collectives:
        found.setdefault((each.phase, each.kind, each.axes), []).append(each)
    return [
        Traffic(
            *key,
            sum(each.times for each in same),
            sum(each.bytes * each.times for each in same),
            _whole(sum(each.share * each.times for each in same)),
            sum(each.num_values * each.times for each in same),
        )
        for key, same in found.items()
    ]


def _whole(sent: Size) -> Size:
    return math.floor(sent) if isinstance(sent, (int, Fraction)) else sent


def traffic_text(traffic: Sequence[Traffic], has_values: bool = False) -> str:
    """A row for each, and one of all; numbers in full, so that two meshes print the same but for sizes.

    ``has_values``: how many values go in those collectives, beside how many these are.
    """
    names = {"values": "values"} if has_values else {}
    names |= {"count": "count", "bytes": "bytes", "wire_bytes": "wire bytes"}
    rows: list[tuple[Any, ...]] = [(*each.key, *(getattr(each, name) for name in names)) for each in traffic]
    total = [sum(getattr(each, name) for each in traffic) for name in names]
    header = ("phase", "kind", "axes", *names.values())
    return table(header, [*rows, ("total", "", "", *total)]) if rows else "no collectives\n"


def collectives_text(collectives: Sequence[Collective]) -> str:
    """How many of each kind, over which axes, and their bytes on one rank; then each with its cause."""
    if not collectives:
        return traffic_text(())
    listed = [
        (
            c.name,
            "+".join(c.axes),
            c.phase,
            f"{c.dtype}{list(c.local_shape_in)}",
            f"{c.dtype}{list(c.local_shape_out)}",
            c.wire_bytes,
            shortened(c.source),
            cause_text(c.causes, most=2),
        )
        for c in collectives
    ]
    header = ("collective", "axes", "phase", "in", "out", "wire bytes", "source", "cause")
    if any(c.stage is not None for c in collectives):
        header = ("stage", "times", *header)  # type: ignore[assignment]
        listed = [(c.stage, c.times, *row) for c, row in zip(collectives, listed, strict=True)]  # type: ignore[misc]
    return f"{traffic_text(traffic_of(collectives))}\n{table(header, listed)}"


def shortened(text: str, separator: str = ", ") -> str:
    """What is said of each member of a bucket, as the first and how many more; then the annotations it comes from."""
    parts = text.split(separator)
    origins = [part for part in parts if _IS_ORIGIN(part)]
    others = len(parts) - len(origins) - 1
    return text if others < 2 else separator.join([parts[0], f"and {others} more", *origins])


def collectives_of(program: Program, count_rows: RowCount = most_rows_sent) -> tuple[Collective, ...]:
    """Every collective of a lowered or localized program, in program order; what is local is none, a bucket is one.

    Of a pipeline those of each stage, with the messages that it sends. ``count_rows`` counts the rows that neighbours
    exchange; a program whose sizes are expressions needs one of its own.
    """
    from shardc.program.stages import has_stages

    if has_stages(program):
        from shardc.program.stages import collectives_of_stages

        return tuple(collectives_of_stages(program, count_rows))
    calls = (node for node in program.calls if is_collective(node, count_rows))
    return tuple(collective_at(program, node, count_rows) for node in calls)


def is_collective(node: fx.Node, count_rows: RowCount = most_rows_sent) -> bool:
    """Whether a node sends anything."""
    parts = members(node)
    if parts:
        return parts[0].kind not in LOCAL_KINDS and not adds_microbatches(node)
    return node.target in EXCHANGES and bool(node.args[1]) and count_rows(node.args[3])[0] != 0  # type: ignore[arg-type]


def bytes_sent(program: Program, node: fx.Node) -> int:
    """The bytes that one rank sends in a collective."""
    return collective_at(program, node).wire_bytes


def collective_at(program: Program, node: fx.Node, count_rows: RowCount = most_rows_sent) -> Collective:
    """What a node sends that is a collective."""
    parts = members(node)
    moved: list[fx.Node] = [part.operand for part in parts] or [node.args[0]]  # type: ignore[list-item]
    before = joined_type([program.local_type(each) for each in moved])
    after = joined_type([program.local_type(node, i) for i in range(len(moved))])
    ranks = 0
    if node.target in EXCHANGES:
        kind: Kind = "collective_permute"
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


def joined_type(types: Sequence[TensorType | None]) -> TensorType:
    """The type of a flat buffer of values; of one value its own."""
    (first, *others) = (type_ for type_ in types if type_ is not None)
    return TensorType((sum(type_.numel for type_ in (first, *others)),), first.dtype) if others else first


def edge_bytes(node: fx.Node, before: TensorType, count_rows: RowCount = most_rows_sent) -> tuple[Size, Size]:
    """Payload and wire bytes of an exchange with neighbours: of the rank that takes or gives most, and gives most."""
    dim, values = node.args[2:4]
    gives, takes = count_rows(values)  # type: ignore[arg-type]
    if node.target is overlap_add:
        gives, takes = takes, gives
    row = before.dtype.itemsize * math.prod(size for i, size in enumerate(before.shape) if i != dim)
    return max(gives, takes) * row, gives * row


def deferrable(program: Program) -> frozenset[fx.Node]:
    """The calls that may run once for several backwards, on the sums of what each backward has for them.

    An all_reduce that ends in gradients of parameters, through nothing but linear ops of such alone, and these ops. So
    a reduce_scatter under stage 1 of ``Zero``; elsewhere it makes a gradient smaller, and is not put off.
    """
    zero = program.options.zero
    kinds = {"all_reduce", "reduce_scatter"} if zero is not None and zero.stage == 1 else {"all_reduce"}
    parameters = _gradients_of_parameters(program)
    ends: set[fx.Node] = set()  # linear ops whose value goes to gradients of parameters alone
    found: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        users = set(node.users) - {program.output_node}
        is_result = program.output_node in node.users
        if node.op != "call_function" or not users <= ends | found or (is_result and node not in parameters):
            continue
        sent = members(node)
        if sent and all(each.kind in kinds and each.args[1] == "sum" for each in sent):
            found.add(node)
        elif _is_linear(program, node):
            ends.add(node)
    return frozenset(_closed(program, found))


def _gradients_of_parameters(program: Program) -> set[fx.Node]:
    """Results that are gradients of parameters and nothing else."""
    parameters, ends = set(parameters_of(program).values()), list(ends_of(program))
    others = {node for output, owner, node in ends if output.kind != "gradient" or owner not in parameters}
    return {node for *_, node in ends if node is not None} - others


def _is_linear(program: Program, node: fx.Node) -> bool:
    if is_getitem(node) or node.target is fit:
        return True
    if sent := members(node):
        return all(each.kind != "mask_padding" and each.args[1] not in ("max", "min") for each in sent)
    if node.target in EXCHANGES:
        return False  # its local types do not say its rule
    given = frozenset(i for i, taken in enumerate(operands(node)) if taken is not None)
    return given in program.rule(node).linear


def _closed(program: Program, reductions: set[fx.Node]) -> set[fx.Node]:
    """The reductions and what follows, without those that something else is joined to on the way."""
    while True:
        reached = {node: descendants(node) - {program.output_node} for node in reductions}
        closed = set().union(*reached.values())
        open_ends = {each for each in closed - reductions if not set(each.all_input_nodes) <= closed}
        if not open_ends:
            return closed
        reductions = {node for node in reductions if not reached[node] & open_ends}


def fallbacks_of(program: Program) -> list[fx.Node]:
    """The ops that have no rule and so run whole on every rank."""
    ours = {*COLLECTIVES, bucket, reshard, fit}
    return [node for node in program.calls if node.target not in ours and program.is_fallback(node)]
