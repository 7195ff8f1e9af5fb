"""The two ops that bring positions of a dim into zigzag and back in order, see ``shardc.language.zigzag``."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.zigzag import in_zigzag


def zigzag(x: Tensor, dim: int, outer: int, inner: int, count: int, is_whole: bool = False) -> Tensor:
    """The elements of a dim in zigzag over ``count`` ranks.

    The dim is seen as ``[outer, positions, inner]``. ``is_whole``: every rank has all of them, and takes its own.
    """
    apart = _apart(x, dim, outer, inner)
    pieces = [apart.narrow(dim + 1, each.start, len(each)) for each in in_zigzag(apart.shape[dim + 1], count)]
    return torch.cat(pieces, dim + 1).reshape(x.shape) if pieces else x.clone()


def in_order(x: Tensor, dim: int, outer: int, inner: int, count: int, is_whole: bool = False) -> Tensor:
    """The inverse of ``zigzag``."""
    apart, at, pieces = _apart(x, dim, outer, inner), 0, dict[int, Tensor]()
    for each in in_zigzag(apart.shape[dim + 1], count):
        pieces[each.start] = apart.narrow(dim + 1, at, len(each))
        at += len(each)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim + 1).reshape(x.shape) if pieces else x.clone()


def _apart(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    length = x.shape[dim] // max(1, outer * inner)
    return x.reshape([*x.shape[:dim], outer, length, inner, *x.shape[dim + 1 :]])


def _rule(call: OpCall) -> Rule:
    """Positions are whole until ``decompose`` lets ranks exchange them; those of a dim with other factors stay so."""
    _, dim, outer, inner, _, is_whole = call.args
    is_exchanged = not is_whole and outer == inner == 1
    names = [f"d{i}" for i in range(len(call.operand.shape))]
    names[dim] = "t" if is_exchanged else "(o t i)"
    spec = " ".join(names)
    if is_exchanged:
        return make_rule(f"{spec} -> {spec}", call, chunks={"t": 1}, linear="0")
    return make_rule(f"{spec} -> {spec}", call, sizes={"o": outer, "i": inner}, whole="t", linear="0")


rule((zigzag, in_order), _rule)
