"""The nodes around a collective of codes in a localized program: their targets and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from shardc.ops.codes import CUT, JOINED, add_residual, decode_rows, encode_rows, left_out_rows, mix_momentum
from shardc.ops.codes import add_codes as add_rows
from shardc.program.coding.nodes import add_codes, decode, encode, left_out, with_momentum, with_residual
from shardc.program.collective import group_size, steps_sharding
from shardc.program.node import operand
from shardc.program.program import Program

Shape = tuple[int, ...]


def piece_of(program: Program, value: fx.Node, kind: Any, args: tuple[Any, ...]) -> Shape:
    """The local shape of the part of a value that a rank sends to another: its shard, or the piece that is cut from it.

    ``args``: those of the collective after the value.
    """
    before, whole = program.sharding(value), program.global_type(value).shape
    shape = before.local_shape(whole)
    if kind not in CUT:
        return shape
    after = steps_sharding(before, kind, args).local_shape(whole)
    return tuple(after[dim] if dim == args[-1] else size for dim, size in enumerate(shape))


def local_call(program: Program, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The target and the arguments of a node of codes on one rank."""
    if node.target is add_codes:
        codec, own, codes = node.args
        return add_rows, (codec, program.type(node).dtype, own, codes)
    if node.target is with_residual:
        return add_residual, node.args
    if node.target is with_momentum:
        return mix_momentum, node.args
    if node.target is left_out:
        kind, _, _, codec, _, codes, index, rest, before, *values = node.args
        _, _, count, dims, lengths, *_ = local_call(program, operand(node, 5))[1]
        return left_out_rows, (kind, codec, count, dims, lengths, codes, index, rest, before, *values)
    arguments: tuple[Any, ...] = node.args
    kind, axes, args, codec, *operands = arguments

    def pieces_of(values: Sequence[fx.Node]) -> tuple[Shape, ...]:
        return tuple(piece_of(program, x, kind, (axes, *rest)) for x, rest in zip(values, args, strict=True))

    if node.target is encode:
        assert program.mesh is not None
        dims = tuple(rest[-1] if kind in CUT else 0 for rest in args)
        lengths = tuple(piece[dim] if kind in CUT else 0 for piece, dim in zip(pieces_of(operands), dims, strict=True))
        return encode_rows, (kind, codec, group_size(program.mesh, kind, (axes, *args[0])), dims, lengths, *operands)
    assert node.target is decode, node
    types = [type_ for type_ in program.types(node) if type_ is not None]
    shapes = tuple(type_.shape for type_ in types)
    (codes,) = operands
    pieces = pieces_of(operand(codes).args[4:]) if kind in JOINED else shapes  # type: ignore[arg-type]
    dims = tuple(rest[0] if kind in JOINED else 0 for rest in args)
    return decode_rows, (kind, codec, dims, pieces, shapes, types[0].dtype, codes)
