"""Attention over positions cut by more ranks than can share its heads: groups of ranks share heads and form a ring.

Ranks with consecutive positions, such as those of a node, bring these together and keep some of the heads each::

    q, k, v: f32[b, 8, t@cp, d]                      # cp of 64 ranks
        ->
    q, k, v: f32[b, 8@cp:(8)8, t@cp:(1)8, d]         # by all_to_all in groups of 8
    y = attention(q, k, v) as a ring of 8 chunks     # not of 64
    y: f32[b, 8, t@cp, d]                            # by all_to_all

This is Ulysses and a ring at once (USP, Fang and Zhao 2024): a rank sends its values within its group, and keys 7 times
instead of 63.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from torch import fx

from shardc.language.mesh import MICROBATCH, Axes
from shardc.language.partition import P
from shardc.language.sharding import DimSharding, Sharding, num_shards
from shardc.ops.attention.ring import POSITIONS
from shardc.ops.pointwise import ANNOTATE
from shardc.program.node import is_annotation, operand

from ..emitter import Emitter
from .along import Along

HEADS = 1  # the dim of queries and keys
BY_HEADS, BY_POSITIONS = "by_heads", "by_positions"  # names of the inserted values
LAST = 1000  # a priority behind all others, so that no weight is cut as heads are


@dataclass(frozen=True, slots=True)
class Shared:
    """Shardings of queries, keys and values: ``positions`` as they arrive, ``heads`` while ranks share heads.

    ``annotation``: the annotation that cuts positions.
    """

    positions: dict[str, Sharding]
    heads: dict[str, Sharding]
    annotation: str

    @staticmethod
    def by(along: Along, ranks: int) -> Shared | None:
        """The shardings if groups of ``ranks`` ranks share heads; None if tensors or axes cannot be divided so."""
        program, given = along.emit.program, {name: along.given[name] for name in ("query", "key", "value")}
        arriving = {name: program.sharding(x) for name, x in given.items()}
        heads, positions = arriving["key"].dims[HEADS : POSITIONS + 1]
        axes = _split(positions.axes, ranks)
        if axes is None or heads.minor or positions.minor or num_shards(positions.axes) != along.count:
            return None
        if any(part.name == MICROBATCH for part in positions.axes):
            return None  # microbatches run one after another
        shared = DimSharding((*heads.axes, *axes[1])), DimSharding(axes[0])
        shapes = [along.emit.shape(x)[HEADS : POSITIONS + 1] for x in given.values()]
        are_whole = not axes[0]
        is_even = all(shared[0].is_even(count) and (are_whole or positions.is_even(length)) for count, length in shapes)
        if not is_even or any(each.dims[HEADS : POSITIONS + 1] != (heads, positions) for each in arriving.values()):
            return None
        node, index = program.value(given["key"])
        origin = program.origins(node)[index][axes[1][0].name]
        moved = {name: _with_dims(each, shared) for name, each in arriving.items()}
        return Shared(arriving, moved, origin.annotation)


def _with_dims(sharding: Sharding, shared: tuple[DimSharding, DimSharding]) -> Sharding:
    """A sharding with another cut of heads and positions."""
    return replace(sharding, dims=(sharding.dims[0], *shared, *sharding.dims[3:]))


def _split(axes: Axes, ranks: int) -> tuple[Axes, Axes] | None:
    """Axes split into the major rest and a minor part of ``ranks`` ranks; None if an axis cannot be split so."""
    rest, minor = list(axes), list[Axes]()
    while ranks > 1 and rest:
        last = rest.pop()
        size = gcd(last.size, ranks)
        if size < last.size:
            if size < ranks:
                return None
            rest.append(last.major(last.size // size))
        minor.insert(0, (last.minor(size),))
        ranks //= size
    return (tuple(rest), tuple(part for each in minor for part in each)) if ranks == 1 else None


def with_heads(emit: Emitter, shared: Shared, names: Sequence[str]) -> dict[str, fx.Node]:
    """Operands of attention, or of its backward, cut as ranks share heads."""
    found = {}
    for name in names:
        x = emit.given[name]
        if name == "out" and is_annotation(x):
            x = operand(x)  # the value before forward brought it back to positions
        found[name] = _annotated(emit, x, shared.heads.get(name, shared.heads["query"]), shared.annotation, LAST)
    return found


def with_positions(
    emit: Emitter, shared: Shared, results: Sequence[fx.Node | None], names: Sequence[str]
) -> list[fx.Node | None]:
    """The results; the first of them are cut again as the operands of these names arrived."""
    pairs = zip(results, names, strict=False)
    brought = [x and _annotated(emit, x, shared.positions[name], shared.annotation) for x, name in pairs]
    return [*brought, *results[len(brought) :]]


def _annotated(emit: Emitter, x: fx.Node, sharding: Sharding, text: str, priority: int = 0) -> fx.Node:
    """A value annotated with these cuts of heads and positions; its batch stays open, and has all but microbatches."""
    shape, batch = emit.shape(x), sharding.dims[0]
    batch = replace(batch, axes=tuple(part for part in batch.axes if part.name != MICROBATCH))
    spec = P.of(replace(sharding, dims=(batch, *sharding.dims[1 : len(shape)])), shape, frozenset([0]))
    args, name = (x, str(spec), [priority] * len(shape) if priority else []), BY_HEADS if priority else BY_POSITIONS
    return emit.program.insert(ANNOTATE, args, emit.type(x), emit.node, {"text": text}, name)
