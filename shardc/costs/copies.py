"""Copies around a collective: of operands into the order in which they are sent, and of what has arrived.

A collective sends and receives pieces that are contiguous in memory. Pieces along the first dim are; along another dim
a rank copies the whole value. On most backends the values of a bucket are also copied into one buffer and out of it.
"""

from __future__ import annotations

from math import prod

from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.program.communication import Member, bucket, members
from shardc.program.program import Program


def copy_seconds(program: Program, node: fx.Node) -> tuple[float, float]:
    """The seconds for which a rank copies operands before a collective is sent, and results after it has arrived."""
    device = program.options.machine.device
    packs = node.target is bucket and device.packs
    copied = [_copied(program, node, part, packs) for part in members(node)]
    before, after = (2 * sum(each) for each in zip(*copied, strict=True)) if copied else (0, 0)  # read and written
    return device.seconds(0, before), device.seconds(0, after)


def _copied(program: Program, node: fx.Node, part: Member, packs: bool) -> tuple[int, int]:
    """The bytes of the operand, and of the result, of one collective if they are copied; else 0."""
    operand, result = program.local_type(*program.value(part.operand)), program.local_type(node, part.index)
    if operand is None or result is None:
        return 0, 0
    is_packed = is_unpacked = False
    if part.kind == "all_gather":
        is_packed, is_unpacked = packs, packs or _is_strided(result, part.args[1])
    elif part.kind == "reduce_scatter":
        is_packed = packs or _is_strided(operand, part.args[2])
    elif part.kind == "all_to_all":
        is_packed, is_unpacked = _is_strided(operand, part.args[2]), _is_strided(result, part.args[1])
    elif part.kind == "all_reduce" and node.target is bucket:  # a product is computed in the buffer
        is_packed = part.operand.target is not dot or len(part.operand.users) > 1
    return is_packed * operand.nbytes, is_unpacked * result.nbytes


def _is_strided(type_: TensorType, dim: int) -> bool:
    """Whether pieces along a dim are not contiguous in the whole."""
    return prod(type_.shape[:dim]) > 1
