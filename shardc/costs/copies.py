"""Copies around a collective: of operands into the order in which they are sent, and of what has arrived.

A collective sends and receives pieces that are contiguous in memory. Pieces along the first dim are; along another dim
a rank copies the whole value. On most backends the values of a bucket are also copied into one buffer and out of it.
"""

from __future__ import annotations

from math import prod

from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.contraction import dot
from shardc.program.collective import group_size
from shardc.program.communication import LARGE_PRODUCT, bucket, members
from shardc.program.program import Program


def copy_seconds(program: Program, node: fx.Node) -> tuple[float, float]:
    """The seconds for which a rank copies operands before a collective is sent, and results after it has arrived."""
    device = program.options.machine.device
    before, after = (sum(device.seconds(0, 2 * nbytes) for nbytes in each) for each in _copies(program, node))
    return before, after


def _copies(program: Program, node: fx.Node) -> tuple[list[int], list[int]]:
    """The bytes of each copy before a collective, and of each copy after it."""
    before, after, packed = list[int](), list[int](), 0
    parts = members(node)
    if not parts or group_size(program.mesh, parts[0].kind, parts[0].args) == 1:  # type: ignore[arg-type]
        return before, after
    packs = node.target is bucket and program.options.machine.device.packs
    for part in parts:
        operand, result = program.local_type(*program.value(part.operand)), program.local_type(node, part.index)
        if operand is None or result is None:
            continue
        if part.kind == "all_gather":
            packed += packs * operand.nbytes
            after += [result.nbytes] if packs or _is_strided(result, part.args[1]) else []
        elif part.kind == "reduce_scatter":
            packed += packs * operand.nbytes
            before += [operand.nbytes] if _is_strided(operand, part.args[2]) else []
        elif part.kind == "all_to_all":
            before += [operand.nbytes] if _is_strided(operand, part.args[2]) else []
            after += [result.nbytes] if _is_strided(result, part.args[1]) else []
        elif part.kind == "all_reduce" and node.target is bucket:
            packed += operand.nbytes * (not _is_in_buffer(part.operand, operand))
    return [*before, packed], after


def _is_in_buffer(node: fx.Node, type_: TensorType) -> bool:
    """Whether a value is computed in the buffer of its bucket: a large product that nothing else reads."""
    return node.target is dot and len(node.users) == 1 and prod(type_.shape) >= LARGE_PRODUCT


def _is_strided(type_: TensorType, dim: int) -> bool:
    """Whether pieces along a dim are not contiguous in the whole."""
    return prod(type_.shape[:dim]) > 1
