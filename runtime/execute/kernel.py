"""Chooses the kernel of a call: one that overwrites an operand, or adds a bias, if that gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from shardc.language.errors import ShardingError
from shardc.ops.attention.layout import LAYOUTS, Layout
from shardc.ops.contraction import dot, takes_bias
from shardc.ops.index import WRITE_OVER
from shardc.ops.pointwise import is_pointwise
from shardc.program.lifetime import dies_at, is_whole
from shardc.program.opaque import Opaque
from shardc.program.program import Program

from ..comm.process_group import is_traced

aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)
Kernel = Callable[..., Any]


def biased_products(part: Sequence[fx.Node], program: Program) -> dict[fx.Node, fx.Node]:
    """The additions of a bias row to a contraction without other readers, each with its contraction."""
    inside, result = set(part), {}
    for node in part:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            product, bias = node.all_input_nodes
            is_sum = product in inside and product.target is dot and node.args == (product, bias)
            if is_sum and len(product.users) == 1 and takes_bias(str(product.args[2])):
                whole, row = program.type(product), program.value_type(program.value(bias))
                is_row = row.shape == whole.shape[-1:] and row.dtype == whole.dtype and len(whole.shape) > 1
                if is_row and program.type(node) == whole:
                    result[node] = product
    return result


def kernel_of(node: fx.Node, target: Kernel) -> Kernel:
    """The kernel of a call, which fx can name. ``target``: its op, or the form of it that overwrites an operand."""
    kernel = _direct(target)
    if node.target in LAYOUTS:
        kernel = _with_layout(kernel, LAYOUTS[node.target])
    return _custom(kernel, node.name) if _is_custom(node.target) else kernel


@cache
def _direct(target: Kernel) -> Kernel:
    """An op without its Python wrapper."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    kernel = partial(target._op)
    kernel.__name__ = str(target)  # type: ignore[attr-defined]
    return kernel


def overwriting(
    node: fx.Node, order: Mapping[fx.Node, int], program: Program, device: torch.device
) -> tuple[Kernel, tuple[Any, ...]] | None:
    """The kernel, with its arguments, that overwrites an operand without later readers; None if there is none."""
    kernel = _softmax(node, program) if node.target in SOFTMAX and device.type == "cpu" else _in_place(node.target)
    if kernel is None:
        return None
    orders = [node.args, (*node.args[1::-1], *node.args[2:])] if node.target in COMMUTATIVE else [node.args]
    for args in orders:
        first = args[0] if args else None
        if isinstance(first, fx.Node) and dies_at(first, node, order) and is_whole(first, program):
            if program.value_type(program.value(first)) == program.type(node):
                return kernel, args
    return None


def _in_place(target: Any) -> Kernel | None:
    """The form of a pointwise op, or of one of shardc's own ops, that overwrites its first operand."""
    if target in WRITE_OVER:
        return WRITE_OVER[target]
    if not is_pointwise(target) or target.namespace != "aten" or target._schema.name.endswith("_"):
        return None
    packet = getattr(aten, f"{target._schema.name.partition('::')[2]}_", None)
    overload = getattr(packet, target._overloadname, None)
    if overload is not None and _argument_names(overload) == _argument_names(target):
        return overload
    into = getattr(target.overloadpacket, "grad_input", None)
    if into is None:
        return None

    def over_gradient(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return into(first, *args, **kwargs, grad_input=first)

    return over_gradient


def _argument_names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]


def _softmax(node: fx.Node, program: Program) -> Kernel | None:
    """A softmax over the last dim that overwrites its operand if that is contiguous."""
    op: Any = node.target

    def over_operand(x: Tensor, *args: Any) -> Any:
        return op.overloadpacket.out(x, *args, out=x) if x.is_contiguous() else op(x, *args)

    return over_operand if node.args[1] in (-1, len(program.type(node).shape) - 1) else None


def _with_layout(kernel: Kernel, layout: Layout) -> Kernel:
    """The kernel behind a conversion: operands whose memory layout it does not accept are copied first."""

    def prepared(*args: Any, **kwargs: Any) -> Any:
        return kernel(*(layout(i, args) if isinstance(x, Tensor) else x for i, x in enumerate(args)), **kwargs)

    return prepared


def _is_custom(target: Any) -> bool:
    """Whether an op belongs to another library, so that its kernel may rely on the memory layout of operands."""
    is_op = isinstance(target, (torch._ops.OpOverload, Opaque))
    return is_op and getattr(target, "namespace", "") not in ("aten", "prims", "shardc", "_c10d_functional")


def _custom(kernel: Kernel, name: str) -> Kernel:
    """A custom op on contiguous operands. Raises a ShardingError if its first run draws random numbers."""
    runs = count()

    def custom(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
        if next(runs) or is_traced():
            return kernel(*args, **kwargs)
        state = torch.get_rng_state()
        result = kernel(*args, **kwargs)
        if not torch.equal(state, torch.get_rng_state()):
            raise ShardingError(
                name, "an op of your own",
                "it draws random numbers, which would depend on the rank",
                "give it the numbers as an operand, drawn in the model with torch",
            )  # fmt: skip
        return result

    return custom
