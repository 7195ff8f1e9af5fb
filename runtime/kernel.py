"""Which kernel runs a call: a contraction bound to its shapes, with its bias; a result in the memory of an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.node import is_pointwise
from shardc.ops.contraction import BoundDot, dot
from shardc.ops.position import WRITE_OVER
from shardc.ownership import dies_at, is_whole
from shardc.program import Program

from .onednn import choose, is_faster

aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def bound(node: fx.Node, program: Program, device: torch.device) -> BoundDot:
    """A contraction, with what chooses its kernel."""
    spec = str(node.args[2])
    return BoundDot(spec, choose) if is_faster(program.type(node).dtype, device) else BoundDot(spec)


def biased(part: Sequence[fx.Node], program: Program) -> dict[fx.Node, fx.Node]:
    """Sums that add a bias to a contraction whose product no one else reads, each with the contraction."""
    here, found = set(part), {}
    for node in part:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            product, bias = node.all_input_nodes
            if product in here and product.target is dot and len(product.users) == 1:
                if node.args == (product, bias) and _fits(program, product, bias, node):
                    found[node] = product
    return found


def _fits(program: Program, product: fx.Node, bias: fx.Node, total: fx.Node) -> bool:
    made, added = program.type(product), program.value_type(program.value(bias))
    is_row = added.shape == made.shape[-1:] and len(made.shape) > 1 and program.type(total) == made
    return is_row and added.dtype == made.dtype and BoundDot(str(product.args[2])).takes_bias


def in_place(
    node: fx.Node, part: Mapping[fx.Node, int], program: Program, device: torch.device
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The op, with its arguments, that writes the result over an operand that no one reads after; None without one."""
    twin = _softmax(node, program) if node.target in SOFTMAX and device.type == "cpu" else _twin(node.target)
    if twin is None:
        return None
    orders = [node.args, (*node.args[1::-1], *node.args[2:])] if node.target in COMMUTATIVE else [node.args]
    for args in orders:
        first = args[0] if args else None
        if isinstance(first, fx.Node) and dies_at(first, node, part) and is_whole(first, program):
            if program.value_type(program.value(first)) == program.type(node):
                return twin, args
    return None


def _twin(target: Any) -> Callable[..., Any] | None:
    """The form of a pointwise op, or of one of our own, that writes over its first operand."""
    if target in WRITE_OVER:
        return WRITE_OVER[target]
    if not is_pointwise(target) or target.namespace != "aten" or target._schema.name.endswith("_"):
        return None
    packet = getattr(aten, f"{target._schema.name.partition('::')[2]}_", None)
    twin = getattr(packet, target._overloadname, None)
    if twin is not None and _names(twin) == _names(target):
        return twin
    into = getattr(target.overloadpacket, "grad_input", None)
    return None if into is None else lambda first, *args, **kwargs: into(first, *args, **kwargs, grad_input=first)


def _softmax(node: fx.Node, program: Program) -> Callable[..., Any] | None:
    """A softmax over the last dim that writes over what it is of, where its rows lie one after the other in memory."""
    op: Any = node.target
    into = op.overloadpacket.out
    is_last = node.args[1] in (-1, len(program.type(node).shape) - 1)
    return (lambda x, *args: into(x, *args, out=x) if x.is_contiguous() else op(x, *args)) if is_last else None


def _names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]
