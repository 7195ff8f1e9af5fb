"""Blocks within a factor: a rule whose factors are split where a tensor is cut in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardc.rule import Rule
from shardc.sharding import DimSharding
from shardc.spec import Dims, Side


def refine(rule: Rule, tensors: Iterable[tuple[Dims | None, Sequence[DimSharding], Sequence[int]]]) -> Rule:
    """The rule with each factor split where a tensor is cut in blocks within it, so that plain axes cut the parts.

    ``tensors``: the factors, the cuts and the shape of each. The factor ``n`` of a fused weight, 192 long and cut as
    ``blocks(3, "tp")``, becomes ``n.0 n.1`` of 3 and 64 on every tensor that has it. Where two tensors' blocks do not
    nest the larger blocks win.
    """
    inner: dict[str, set[int]] = {}
    for dims, cuts, shape in tensors:
        for factors, cut, size in zip(dims or (), cuts, shape, strict=dims is not None):
            for factor, points in _block_sizes(factors, cut, size, rule.sizes):
                inner.setdefault(factor, set()).update(points)
    parts = {factor: _nested(rule.sizes[factor], points) for factor, points in inner.items() if points}
    return _split_factors(rule, parts) if parts else rule


def _block_sizes(
    factors: Sequence[str],
    cut: DimSharding,
    size: int,
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, set[int]]]:
    """For each factor the sizes of the blocks that begin within it, counted in its own elements."""
    subdims = cut.subdims(size)
    blocks = {math.prod(sub for sub, _ in subdims[i:]) for i in range(1, len(subdims))}
    for i, factor in enumerate(factors if blocks else ()):
        low = math.prod(sizes[other] for other in factors[i + 1 :])
        high = low * sizes[factor]
        yield factor, {block // low for block in blocks if low < block < high and not (block % low or high % block)}


def _nested(size: int, blocks: set[int]) -> tuple[int, ...]:
    """The sizes of the parts of a factor, major first, for blocks that nest."""
    parts = []
    for block in sorted(blocks, reverse=True):
        if size % block == 0:
            parts.append(size // block)
            size = block
    return (*parts, size)


def _split_factors(rule: Rule, parts: Mapping[str, tuple[int, ...]]) -> Rule:
    names = {factor: tuple(f"{factor}.{i}" for i in range(len(sizes))) for factor, sizes in parts.items()}

    def split(factors: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for factor in factors for name in names.get(factor, (factor,)))

    def side(tensors: Side) -> Side:
        return tuple(None if dims is None else tuple(map(split, dims)) for dims in tensors)

    sizes = {
        name: size
        for factor in rule.sizes
        for name, size in zip(split((factor,)), parts.get(factor, (rule.sizes[factor],)), strict=True)
    }
    return replace(
        rule, operands=side(rule.operands), results=side(rule.results), sizes=sizes, whole=frozenset(split(rule.whole))
    )
