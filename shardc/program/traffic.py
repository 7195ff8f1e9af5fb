"""The collectives of a program, and their traffic: counts and bytes of each kind in a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import fx

from shardc.language.text import bytes_text, folded, over_calls, shortened, table
from shardc.language.windows import most_rows_sent
from shardc.ops.piece import fit
from shardc.program.coding.nodes import CODINGS
from shardc.program.collective import COLLECTIVES, Collective, reshard
from shardc.program.communication import RowCount, bucket, collective_at, is_collective
from shardc.program.program import Program
from shardc.program.provenance import cause_text
from shardc.program.stages import collectives_of_stages, has_stages
from shardc.wire import codec_named

MANY = 2**20  # elements, which fill blocks of any size
Size = Any  # an int; a sympy.Expr where sizes have names


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind, over the same axes, in one phase, of a step on one rank.

    ``values`` are sent in ``count`` collectives. ``wire_bytes`` is the exact sum rounded down, while each
    ``Collective`` rounds its own; an expression is not rounded.
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
    """The traffic of collectives, by phase, kind and axes."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for each in collectives:
        groups.setdefault((each.phase, each.kind, each.axes), []).append(each)
    return [
        Traffic(
            *key,
            sum(each.times for each in same),
            sum(each.bytes * each.times for each in same),
            _whole(sum(each.share * each.times for each in same)),
            sum(each.num_values * each.times for each in same),
        )
        for key, same in groups.items()
    ]


def _whole(sent: Size) -> Size:
    return math.floor(sent) if isinstance(sent, (int, Fraction)) else sent


def traffic_text(traffic: Sequence[Traffic], has_values: bool = False) -> str:
    """A table of traffic with a total. ``has_values`` adds a column with the number of values."""
    counts = ("values", "count") if has_values else ("count",)
    rows = [
        (*each.key, *(getattr(each, name) for name in counts), bytes_text(each.bytes), bytes_text(each.wire_bytes))
        for each in traffic
    ]
    total = [sum(getattr(each, name) for each in traffic) for name in counts]
    total += [bytes_text(sum(getattr(each, name) for each in traffic)) for name in ("bytes", "wire_bytes")]
    header = ("phase", "kind", "axes", *counts, "bytes", "wire bytes")
    return table(header, [*rows, ("total", "", "", *total)]) if rows else "no collectives\n"


def collectives_text(collectives: Sequence[Collective]) -> str:
    """The traffic of collectives, then their rows with types, bytes and cause; those of equal layers share a row."""
    if not collectives:
        return traffic_text(())
    listed = [
        (c.name, "+".join(c.axes), c.phase, f"{c.dtype}{list(c.local_shape_in)}", f"{c.dtype}{list(c.local_shape_out)}",
         bytes_text(c.wire_bytes), shortened(c.source), cause_text(c.causes, most=2))
        for c in collectives
    ]  # fmt: skip
    header = ("collective", "axes", "phase", "in", "out", "wire bytes", "source", "cause")
    if any(c.stage is not None for c in collectives):
        header = ("stage", "times", *header)  # type: ignore[assignment]
        listed = [(c.stage, c.times, *row) for c, row in zip(collectives, listed, strict=True)]  # type: ignore[misc]
    if any(c.codec for c in collectives):
        header = (*header[:-2], "codec", *header[-2:])  # type: ignore[assignment]
        listed = [(*row[:-2], c.codec, *row[-2:]) for c, row in zip(collectives, listed, strict=True)]  # type: ignore[misc]
    rows = folded(listed, header.index("collective"), over_calls)
    return "\n".join([traffic_text(traffic_of(collectives)), table(header, rows), *_codecs_text(collectives)])


def _codecs_text(collectives: Sequence[Collective]) -> Iterator[str]:
    """A table of the codecs: the bytes sent in each, their part of float32's bytes, and the error of normal values."""
    sent: dict[str, Size] = {}
    for each in collectives:
        if each.codec:
            sent[each.codec] = sent.get(each.codec, 0) + each.times * each.wire_bytes
    rows = [
        (name, bytes_text(size), f"{codec.nbytes(MANY) / (4 * MANY):.3f}", f"{codec.error:.2%}")
        for name, size in sorted(sent.items(), key=lambda each: codec_named(each[0]).error)
        for codec in (codec_named(name),)
    ]
    if rows:
        yield table(("codec", "wire bytes", "of float32", "error"), rows)


def collectives_of(program: Program, count_rows: RowCount = most_rows_sent) -> tuple[Collective, ...]:
    """The collectives of a lowered or localized program, in program order; a bucket is one, a local op is none.

    Those of a pipeline come stage by stage, with the messages between stages. ``count_rows`` counts the rows that
    neighbours exchange; a program whose sizes are expressions needs one of its own.
    """
    if has_stages(program):
        return tuple(collectives_of_stages(program, count_rows))
    calls = (node for node in program.calls if is_collective(node, count_rows))
    return tuple(collective_at(program, node, count_rows) for node in calls)


def fallbacks_of(program: Program) -> list[fx.Node]:
    """The ops without a rule, which run whole on every rank."""
    ours = {*COLLECTIVES, *CODINGS, bucket, reshard, fit}
    return [node for node in program.calls if node.target not in ours and program.is_fallback(node)]
