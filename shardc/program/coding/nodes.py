"""The nodes around a collective that sends codes.

A collective of codes stands between an ``encode`` and a ``decode``; an all_reduce is two of them::

    c = encode("all_reduce", ("dp",), (("sum",), ("sum",)), "int8", x, y)
    d = all_to_all(c, ("dp",), 0, 1)
    s = add_codes("int8", d)
    e = encode("all_gather", ("dp",), ((0,),), "int8", s)
    f = all_gather(e, ("dp",), 0)
    z = decode("all_reduce", ("dp",), (("sum",), ("sum",)), "int8", f);  v = z[0];  w = z[1]

In a lowered program all of them are identities of whole values, as collectives are. The type of codes is ``[senders,
receivers, length]``: the first dim is cut by every axis along which the codes of ranks differ. ``shardc/ops/codes.py``
has the local ops, which stand in a localized program.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.ops.codes import add_codes as add_rows
from shardc.ops.codes import decode_rows, encode_rows
from shardc.wire import VALUES

Arguments = tuple[tuple[Any, ...], ...]  # of each value, those of its collective after the axes


def encode(kind: str, axes: tuple[str, ...], args: Arguments, codec: str, *xs: Any) -> Any:
    """Codes of the values of a collective."""
    return xs if len(xs) > 1 else xs[0]


def add_codes(codec: str, codes: Any) -> Any:
    """The sum of the codes from all senders."""
    return codes


def decode(kind: str, axes: tuple[str, ...], args: Arguments, codec: str, codes: Any) -> Any:
    """The results of a collective of several values from their codes."""
    return codes


CODINGS: set[Any] = {encode, add_codes, decode, encode_rows, add_rows, decode_rows}


def is_encode(node: fx.Node) -> bool:
    """Whether a node makes codes, on whole or on local values."""
    return node.target in (encode, encode_rows)


def is_decode(node: fx.Node) -> bool:
    """Whether a node makes values of codes."""
    return node.target in (decode, decode_rows)


def is_step(node: fx.Node) -> bool:
    """Whether a node is what one collective of codes gives, and another one sends, of those that make one."""
    is_between = bool(node.users) and all(map(is_encode, node.users))
    return is_sum_of_codes(node) or (is_decode(node) and is_between)


def is_sum_of_codes(node: fx.Node) -> bool:
    """Whether a node adds what codes stand for, whole or local."""
    return node.target in (add_codes, add_rows)


def codec_name(node: fx.Node) -> str:
    """The name of the codec of the codes that a node makes; empty for a node that makes none, or values."""
    places: dict[Any, int] = {encode: 3, encode_rows: 1}
    place = places.get(node.target)
    return "" if place is None or node.args[place] == VALUES.name else str(node.args[place])
