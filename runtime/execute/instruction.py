"""The calls of a program as instructions: kernels, arguments by slot, and the slots that die after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from shardc.language.errors import ShardingError
from shardc.ops import op_rule
from shardc.ops.contraction import BoundDot, dot
from shardc.ops.index import WRITE_OVER
from shardc.ops.normalization import TAKE_CONTIGUOUS
from shardc.ops.pointwise import is_pointwise
from shardc.program.collective import EXCHANGES, group_size
from shardc.program.communication import bucket, members
from shardc.program.lifetime import dies_at, is_whole, view_chain
from shardc.program.node import is_free, operand, takes_device
from shardc.program.opaque import Opaque
from shardc.program.program import Program
from shardc.program.text import range_name

from ..comm.comm import BucketLayout
from ..comm.process_group import is_traced

Env = list[Any]  # the values of one rank, by slot; None before a value is computed and after its last reader


@dataclass(frozen=True, slots=True)
class Slot:
    """An argument that is read from an ``Env``."""

    index: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call: ``args`` are constants, slots and lists of both, ``kwargs`` constants; ``call`` runs it for one rank.

    ``reads``: the slots among the arguments, in order. ``name``: that of its range in a trace; empty for views.
    ``collective``: the kind of the collective that it starts; ``layout``: that of a bucket's buffer; ``is_own``: nobody
    else reads the memory of its operand. ``uses_up``: a slot that an earlier part filled and whose memory it may
    overwrite, or -1. ``waits``: slots of collectives to wait for first. ``dead``: slots that no later instruction
    reads. ``line``: the user's, ``file.py:line``.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[int, ...]
    call: Callable[[Env], Any]
    result: int
    name: str
    collective: str = ""
    layout: BucketLayout | None = None
    is_own: bool = False
    uses_up: int = -1
    waits: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    line: str = ""

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The printed axes that a collective names: two for a permutation."""
        return self.args[1 : 3 if self.collective == "collective_permute" else 2]


def instructions(part: Sequence[fx.Node], slots: Mapping[fx.Node, int], device: torch.device, program: Program,
                 is_eager: bool, before: Sequence[fx.Node] = ()) -> list[Instruction]:  # fmt: skip
    """The instructions of a part of a program.

    ``is_eager``: ops run rather than being traced for a compiler, so that kernels are chosen here. ``before``: calls of
    earlier parts; their results may be overwritten if only this part still reads them.
    """
    products = biased_products(part, program) if is_eager else {}
    fused = set(products.values())
    order = {node: i for i, node in enumerate((*before, *part), -len(before))} if is_eager else {}
    order |= {product: order[node] for node, product in products.items()}
    result = []
    for node in part:
        if (product := products.get(node)) is not None:  # a contraction and the addition of its bias
            operands = operand(product, 0), operand(product, 1), operand(node, 1)
            target, args = BoundDot(str(product.args[2])), tuple(Slot(slots[each]) for each in operands)
            line = program.source(node).location
            result.append(plain_call(target, args, slots[node], range_name(program, product), line))
        elif node not in fused:
            result.append(_instruction(node, slots, device, program, order))
    return result


def plain_call(
    target: Callable[..., Any], args: tuple[Any, ...], result: int, name: str = "", line: str = ""
) -> Instruction:
    """An instruction without keyword arguments that is no collective."""
    return Instruction(target, args, {}, tuple(_slots(args)), call_of(target, args, {}), result, name, line=line)


def _instruction(
    node: fx.Node, slots: Mapping[fx.Node, int], device: torch.device, program: Program, order: Mapping[fx.Node, int]
) -> Instruction:
    """The instruction of a call.

    ``order``: the index of each call in its part, negative in earlier parts; empty when ops are traced for a compiler.
    In programs below the level localized, collectives are identities.
    """
    assert node.op == "call_function" and callable(node.target), node.format_node()
    in_place = overwriting(node, order, program, device)
    target, positional = in_place or (node.target, node.args)
    if target is dot:
        target, positional = BoundDot(str(node.args[2])), node.args[:2]
    is_bucket = node.target is bucket
    is_own = not is_bucket and bool(members(node)) and dies_at(operand(node), node, order)
    overwritten = in_place[1][0] if in_place else operand(node) if is_own else None
    earlier = (slots[each] for each in view_chain(overwritten) if order.get(each, 0) < 0) if overwritten else iter(())
    named = {name: value for name, value in node.kwargs.items() if isinstance(value, fx.Node)}
    kwargs = {name: value for name, value in node.kwargs.items() if name not in named}
    kwargs |= {"device": device} if takes_device(node.target) else {}
    nodes: Any = (*positional, *named.values())
    args: tuple[Any, ...] = _mutable(fx.map_arg(nodes, lambda each: Slot(slots[each])))  # type: ignore[return-value,arg-type]
    target = with_layout(target, node)
    target = with_names(target, tuple(named)) if named else target
    target = custom(target, node.name) if is_custom(node.target) else target
    collective = _collective(program, node) if program.level == "localized" else ""
    layout = BucketLayout.of(program, node) if collective and is_bucket else None
    name, line = "" if is_free(node) else range_name(program, node), program.source(node).location
    return Instruction(
        target, args, kwargs, tuple(_slots(args)), call_of(target, args, kwargs), slots[node], name, collective, layout,
        is_bucket or is_own, next(earlier, -1), line=line,
    )  # fmt: skip


def _collective(program: Program, node: fx.Node) -> str:
    """The kind of collective that a call starts; empty for an op, in groups of one, and where nothing is exchanged."""
    if node.target in EXCHANGES:
        return EXCHANGES[node.target] if node.args[1] else ""
    assert program.mesh is not None
    parts = members(node)
    return parts[0].kind if parts and group_size(program.mesh, parts[0].kind, parts[0].args) > 1 else ""


def _slots(argument: Any) -> Iterator[int]:
    if isinstance(argument, Slot):
        yield argument.index
    elif isinstance(argument, (list, tuple)):
        for entry in argument:
            yield from _slots(entry)


def _mutable(argument: Any) -> Any:
    """The argument with ordinary lists in place of fx's immutable ones, which ops do not take."""
    if isinstance(argument, tuple):
        return tuple(map(_mutable, argument))
    return [_mutable(entry) for entry in argument] if isinstance(argument, list) else argument


def call_of(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Env], Any]:
    """A call as compiled Python that reads an ``Env``: five times as fast as filling in an argument list."""
    constants: dict[str, Any] = {}
    return eval(_compiled(f"lambda env: {expression(target, args, kwargs, constants, 'env[{}]'.format)}"), constants)


_compiled = lru_cache(maxsize=4096)(partial(compile, filename="<call>", mode="eval"))  # constants are not in the text


def expression(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], constants: dict[str, Any],
               name_of: Callable[[int], str]) -> str:  # fmt: skip
    """The Python expression of a call. Its constants are added to ``constants`` by name; ``name_of`` names slots."""

    def text(argument: Any) -> str:
        if isinstance(argument, Slot):
            return name_of(argument.index)
        if isinstance(argument, (list, tuple)) and any(True for _ in _slots(argument)):
            entries = "".join(f"{text(entry)}, " for entry in argument)
            return f"[{entries}]" if isinstance(argument, list) else f"({entries})"
        if argument is None or type(argument) in (int, bool):
            return repr(argument)
        name = f"constant{len(constants)}"
        constants[name] = argument
        return name

    op = text(target._op if isinstance(target, torch._ops.OpOverload) else target)
    return f"{op}({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


def with_deaths(instructions: Sequence[Instruction], kept: Collection[int]) -> list[Instruction]:
    """The instructions, each with the slots that die after it; those in ``kept`` never do."""
    alive, result = set(kept), []
    for each in reversed(instructions):
        used = {*each.reads, each.result}
        dead = used - alive
        result.append(replace(each, dead=tuple(sorted(dead))) if dead else each)
        alive |= used
    return result[::-1]


def with_waits(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions, each with the slots of collectives that it is the first to read.

    At most two reduce_scatters over the same axes are in flight, since their operands, which are larger than their
    results, live until they are done.
    """
    started: set[int] = set()
    latest: dict[object, tuple[int, ...]] = {}  # the last two reduce_scatters, by axes
    result = []
    for each in instructions:
        waits = started.intersection(each.reads)
        if each.collective == "reduce_scatter":
            axes = each.layout.parts[0].args[0] if each.layout else each.args[1]
            *older, last = *latest.get(axes, ()), each.result
            waits |= started.intersection(older[:-1])
            latest[axes] = (*older[-1:], last)
        result.append(replace(each, waits=tuple(sorted(waits))) if waits else each)
        started -= waits
        if each.collective:
            started.add(each.result)
    return result


aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)
Kernel = Callable[..., Any]


def biased_products(part: Sequence[fx.Node], program: Program) -> dict[fx.Node, fx.Node]:
    """The additions of a bias, a row, to a contraction that has no other reader, each with its contraction."""
    inside, result = set(part), {}
    for node in part:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            product, bias = node.all_input_nodes
            is_sum = product in inside and product.target is dot and node.args == (product, bias)
            if is_sum and len(product.users) == 1 and BoundDot(str(product.args[2])).takes_bias:
                whole, row = program.type(product), program.value_type(program.value(bias))
                is_row = row.shape == whole.shape[-1:] and row.dtype == whole.dtype and len(whole.shape) > 1
                if is_row and program.type(node) == whole:
                    result[node] = product
    return result


def overwriting(
    node: fx.Node, order: Mapping[fx.Node, int], program: Program, device: torch.device
) -> tuple[Kernel, tuple[Any, ...]] | None:
    """The kernel, with its arguments, that writes the result over an operand without later readers, if there is one."""
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
    """The form of a pointwise op, or of one of shardc's own, that writes over its first operand."""
    if target in WRITE_OVER:
        return WRITE_OVER[target]
    if not is_pointwise(target) or target.namespace != "aten" or target._schema.name.endswith("_"):
        return None
    packet = getattr(aten, f"{target._schema.name.partition('::')[2]}_", None)
    overload = getattr(packet, target._overloadname, None)
    if overload is not None and _argument_names(overload) == _argument_names(target):
        return overload
    into = getattr(target.overloadpacket, "grad_input", None)
    return None if into is None else lambda first, *args, **kwargs: into(first, *args, **kwargs, grad_input=first)


def _argument_names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]


def _softmax(node: fx.Node, program: Program) -> Kernel | None:
    """A softmax over the last dim that writes over its operand, if the operand is contiguous."""
    op: Any = node.target
    into = op.overloadpacket.out
    is_last = node.args[1] in (-1, len(program.type(node).shape) - 1)
    return (lambda x, *args: into(x, *args, out=x) if x.is_contiguous() else op(x, *args)) if is_last else None


def with_layout(kernel: Kernel, node: fx.Node) -> Kernel:
    """The kernel of a call, on copies of operands whose memory layout the op does not take."""
    rule, needs_contiguous = op_rule(node.target), node.target in TAKE_CONTIGUOUS
    if not needs_contiguous and (rule is None or not rule.is_dense):
        return kernel

    def prepare(x: Any) -> Any:
        is_ready = not isinstance(x, Tensor) or (not needs_contiguous and (x.ndim == 0 or x.stride(-1) == 1))
        return x if is_ready else x.contiguous()

    return lambda *args, **kwargs: kernel(*map(prepare, args), **kwargs)


def with_names(kernel: Kernel, names: tuple[str, ...]) -> Kernel:
    """A wrapper that passes its last positional arguments on as the keywords ``names``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        split = len(args) - len(names)
        return kernel(*args[:split], **dict(zip(names, args[split:], strict=True)), **kwargs)

    return call


def is_custom(target: Any) -> bool:
    """Whether an op belongs to another library, so that its kernel may rely on the memory layout of operands."""
    is_op = isinstance(target, (torch._ops.OpOverload, Opaque))
    return is_op and getattr(target, "namespace", "") not in ("aten", "prims", "shardc", "_c10d_functional")


def custom(kernel: Kernel, name: str) -> Kernel:
    """A custom op on contiguous operands; a ShardingError if its first run draws random numbers."""
    runs = count()

    def call(*args: Any, **kwargs: Any) -> Any:
        args = pytree.tree_map_only(Tensor, Tensor.contiguous, args)
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

    return call
