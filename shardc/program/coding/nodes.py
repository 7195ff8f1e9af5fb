"""The nodes around a collective that sends codes.

A collective of codes stands between an ``encode`` and a ``decode``; an all_reduce is two of them::

    c = encode("all_reduce", ("dp",), (("sum",), ("sum",)), "int8", x, y)
    d = all_to_all(c, ("dp",), 0, 1)
    s = add_codes("int8", (), d)
    e = encode("all_gather", ("dp",), ((0,),), "int8", s)
    f = all_gather(e, ("dp",), 0)
    z = decode("all_reduce", ("dp",), (("sum",), ("sum",)), "int8", f);  v = z[0];  w = z[1]

In a lowered program all of them are identities of whole values, as collectives are. The type of codes is ``[senders,
receivers, length]``: the first dim is cut by every axis along which the codes of ranks differ. ``shardc/ops/codes.py``
has the local ops, which stand in a localized program.

A codec with feedback takes what it left out in the step before, an input ``residual``, and returns what it leaves out::

    a = with_residual(x, r)
    c = encode("all_reduce", ("dp",), (("sum",),), "1bit", a)
    d = all_to_all(c, ("dp",), 0, 1)
    s = add_codes("1bit", (i, a), d)
    e = encode("all_gather", ("dp",), ((0,),), "1bit", s)
    ...
    t = left_out("all_gather", ("dp",), ((0,),), "1bit", 1, e, None, None, (), s)
    r = left_out("all_reduce", ("dp",), (("sum",),), "1bit", 2, c, i, t, (r,), a)

The type of a residual is ``[ranks, *shape]``, of which each rank has its own part: the first dim is cut by the axes
over which the value is partial. A rank adds its own piece ``i`` of a sum as it is, so that codes leave nothing out of
that piece; in its place the residual keeps what the second encoding leaves out of the sum. One residual is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ops.codes import (
    BEFORE,
    INDEX,
    add_residual,
    decode_rows,
    encode_rows,
    left_out_rows,
    mix_momentum,
    sum_dtype,
)
from shardc.ops.codes import add_codes as add_rows
from shardc.program.node import operand
from shardc.wire import VALUES

Arguments = tuple[tuple[Any, ...], ...]  # for each value, the arguments of its collective after the axes


def encode(kind: str, axes: tuple[str, ...], args: Arguments, codec: str, *xs: Any) -> Any:
    """Codes of the values of a collective."""
    return xs if len(xs) > 1 else xs[0]


def add_codes(codec: str, own: tuple[Any, ...], codes: Any) -> Any:
    """The sum of the codes from all senders.

    ``own``: if given, the number of this rank's piece and the values; that piece is added as it is, not as its codes.
    """
    return codes


def decode(kind: str, axes: tuple[str, ...], args: Arguments, codec: str, codes: Any) -> Any:
    """The results of a collective, decoded from codes."""
    return codes


def with_residual(x: Any, residual: Any) -> Any:
    """A value plus what codes left out of it before."""
    return x + residual.sum(0)


def with_momentum(x: Any, momentum: Any, beta: float, ranks: int) -> Any:
    """The optimizer's new momentum, from the last one and a gradient that is the sum over ``ranks`` ranks."""
    return (1 - beta) * x + beta * momentum


def left_out(
    kind: str, axes: tuple[str, ...], args: Arguments, codec: str, ranks: int, codes: Any, index: Any, rest: Any,
    before: tuple[Any, ...], *xs: Any,
) -> Any:  # fmt: skip
    """The residual of each value, ``[ranks, *shape]``: what the codes of a collective leave out of it.

    ``rest``: what was left out of the sum of this rank's own piece, that of ``index``. ``before``: the residuals of the
    last step, which a runtime may write over.
    """
    zeros = tuple(torch.zeros((ranks, *x.shape), dtype=sum_dtype(x.dtype), device=x.device) for x in xs)
    return zeros if len(zeros) > 1 else zeros[0]


CODINGS: set[Any] = {
    *(encode, add_codes, decode, with_residual, with_momentum, left_out),
    *(encode_rows, add_rows, decode_rows, add_residual, mix_momentum, left_out_rows),
}


def adds_state(node: fx.Node) -> bool:
    """Whether a node adds a residual or a momentum to a gradient, whole or local."""
    return node.target in (with_residual, with_momentum, add_residual, mix_momentum)


def state_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands of a node that are no gradients: residuals, a momentum, the index of this rank."""
    if adds_state(node):
        return (operand(node, 1),)
    if is_sum_of_codes(node):
        own: tuple[fx.Node, ...] = node.args[-2]  # type: ignore[assignment]
        return own[:1]
    index: Any = node.args[INDEX] if node.target in (left_out, left_out_rows) else None
    return (*residuals_before(node), *((index,) if isinstance(index, fx.Node) else ()))


def residuals_before(node: fx.Node) -> tuple[fx.Node, ...]:
    """The residuals that a node writes over, whole or local."""
    found: tuple[fx.Node, ...] = node.args[BEFORE] if node.target in (left_out, left_out_rows) else ()  # type: ignore[assignment]
    return found


def is_encode(node: fx.Node) -> bool:
    """Whether a node makes codes, on whole or on local values."""
    return node.target in (encode, encode_rows)


def is_decode(node: fx.Node) -> bool:
    """Whether a node makes values from codes."""
    return node.target in (decode, decode_rows)


def is_step(node: fx.Node) -> bool:
    """Whether a node stands between the two steps of a collective in codes: the first makes it, the second sends it."""
    is_between = bool(node.users) and all(map(is_encode, node.users))
    return is_sum_of_codes(node) or (is_decode(node) and is_between)


def is_sum_of_codes(node: fx.Node) -> bool:
    """Whether a node adds the values that codes stand for, whole or local."""
    return node.target in (add_codes, add_rows)


def codec_name(node: fx.Node) -> str:
    """The name of the codec in which a node encodes; empty for a node that makes no codes, or keeps plain values."""
    places: dict[Any, int] = {encode: 3, encode_rows: 1}
    place = places.get(node.target)
    return "" if place is None or node.args[place] == VALUES.name else str(node.args[place])
