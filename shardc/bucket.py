"""A bucket: several collectives of one kind over the same axes that go as one, over a flat buffer.

In global shapes it is as much an identity as its members are; a runtime puts their local values into one buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.collective import COLLECTIVES, EXCHANGES, LOCAL_KINDS, Kind
from shardc.mesh import axis_of

if TYPE_CHECKING:
    from torch import fx


def bucket(kind: Kind, axes: tuple[str, ...], args: tuple[tuple[Any, ...], ...], *xs: Any) -> tuple[Any, ...]:
    """Each of ``xs`` through a collective of this kind, whose further arguments are those of ``args`` at its place."""
    return xs


@dataclass(frozen=True, slots=True)
class Member:
    """One collective: of ``operand``, with ``args`` after the value, to the node's result at ``index``."""

    kind: Kind
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
