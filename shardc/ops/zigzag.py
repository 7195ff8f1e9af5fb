"""Zigzag: an order of positions in which each of several ranks has an early and a late stretch of them.

In causal attention later positions see more. If each rank has one run of positions, the last rank does almost twice its
share. With 2 * count stretches each rank does the same: the last rank has the first and the last stretch, the rank
before it has those next to them, and so on::

    8 positions, 2 ranks     in order   0 1 2 3 | 4 5 6 7
                             zigzag     2 3 4 5 | 0 1 6 7

The last position is the last in either order, so that dropping it leaves all others in place. Two ops bring positions
into that order and back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import ceil_div


def stretches(length: int, count: int, index: int) -> tuple[range, range]:
    """The early and the late stretch of a rank, together as many positions as torch.chunk gives it."""
    chunk = ceil_div(length, count)
    before, after = min(length, index * chunk), max(0, length - (index + 1) * chunk)  # positions of other ranks
    own = length - before - after
    start, end = _early(after, chunk), _early(own + after, chunk)
    return range(start, end), range(before + end, before + own + start)


def _early(length: int, chunk: int) -> int:
    """The number of positions in early stretches, if ``length`` positions are cut in chunks of ``chunk``."""
    half = ceil_div(chunk, 2)
    return length // chunk * half + min(half, length % chunk) if chunk else 0


def in_zigzag(length: int, count: int) -> list[range]:
    """The stretches of all ranks, one after the other."""
    return [stretch for index in range(count) for stretch in stretches(length, count, index) if stretch]


def zigzag(x: Tensor, dim: int, outer: int, inner: int, count: int, is_whole: bool = False) -> Tensor:
    """The elements of a dim in zigzag over ``count`` ranks.

    The dim is seen as ``[outer, positions, inner]``. ``is_whole``: every rank has all of them, and takes its own.
    """
    if x.is_meta:  # sizes may be symbols, which a loop over stretches would turn into numbers
        return torch.empty_like(x)
    apart = _apart(x, dim, outer, inner)
    pieces = [apart.narrow(dim + 1, each.start, len(each)) for each in in_zigzag(apart.shape[dim + 1], count)]
    return torch.cat(pieces, dim + 1).reshape(x.shape) if pieces else x.clone()


def in_order(x: Tensor, dim: int, outer: int, inner: int, count: int, is_whole: bool = False) -> Tensor:
    """The inverse of ``zigzag``."""
    if x.is_meta:
        return torch.empty_like(x)
    apart, at, pieces = _apart(x, dim, outer, inner), 0, dict[int, Tensor]()
    for each in in_zigzag(apart.shape[dim + 1], count):
        pieces[each.start] = apart.narrow(dim + 1, at, len(each))
        at += len(each)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim + 1).reshape(x.shape) if pieces else x.clone()


def _apart(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    length = x.shape[dim] // max(1, outer * inner)
    return x.reshape([*x.shape[:dim], outer, length, inner, *x.shape[dim + 1 :]])


def _rule(call: OpCall) -> Rule:
    """Positions are whole until ``decompose`` lets ranks exchange them; in a dim with other factors they stay whole."""
    _, dim, outer, inner, _, is_whole = call.args
    is_exchanged = not is_whole and outer == inner == 1
    names = [f"d{i}" for i in range(len(call.operand.shape))]
    names[dim] = "t" if is_exchanged else "(o t i)"
    spec = " ".join(names)
    if is_exchanged:
        return make_rule(f"{spec} -> {spec}", call, chunks={"t": 1}, linear="0")
    return make_rule(f"{spec} -> {spec}", call, sizes={"o": outer, "i": inner}, whole="t i", linear="0")


def _local(call: OpCall, shard: OpCall) -> dict[int, int]:
    """A rank may have only a part of ``outer``."""
    _, dim, outer, *_ = call.args
    return {2: shard.operand.shape[dim] * outer // max(1, call.operand.shape[dim])}


rule((zigzag, in_order), _rule, local=_local)
