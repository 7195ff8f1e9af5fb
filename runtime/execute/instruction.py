"""A program's calls as instructions: targets resolved, arguments by slot, and what dies after each."""

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
from shardc.program.lifetime import dies_at, is_whole, looked_at
from shardc.program.node import is_getitem, is_view, operand, takes_device
from shardc.program.opaque import Opaque
from shardc.program.program import Program
from shardc.program.text import range_name

from ..comm.comm import BucketLayout
from ..comm.ranges import is_traced

_code = lru_cache(maxsize=4096)(partial(compile, filename="<call>", mode="eval"))  # constants are not in the text
Env = list[Any]  # the values of one rank, by slot; None where there is none yet, or none any more


@dataclass(frozen=True, slots=True)
class Slot:
    """Where in an ``Env`` an argument is found."""

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


def instructions(
    part: Sequence[fx.Node],
    slots: Mapping[fx.Node, int],
    device: torch.device,
    program: Program,
    is_eager: bool,
    before: Sequence[fx.Node] = (),
) -> list[Instruction]:
    """The calls of a part of a program; ``is_eager``: they run as they are, so that kernels are worth a choice.

    ``before``: calls that ran before; what they made and no one but this part still reads, it may write over.
    """
    sums = biased(part, program) if is_eager else {}
    inside = set(sums.values())
    here = {node: i for i, node in enumerate((*before, *part), -len(before))} if is_eager else {}
    here |= {product: here[node] for node, product in sums.items()}
    return [
        with_bias(node, sums[node], slots, program) if node in sums else instruction(node, slots, device, program, here)
        for node in part
        if node not in inside
    ]


def with_bias(node: fx.Node, product: fx.Node, slots: Mapping[fx.Node, int], program: Program) -> Instruction:
    """A contraction and the sum of it and a bias, in one."""
    operands = operand(product, 0), operand(product, 1), operand(node, 1)
    target, args = BoundDot(str(product.args[2])), tuple(Slot(slots[each]) for each in operands)
    return plain_call(target, args, slots[node], range_name(program, product), program.source(node).location)


def plain_call(
    target: Callable[..., Any], args: tuple[Any, ...], result: int, name: str = "", line: str = ""
) -> Instruction:
    """A call of constants and slots, no collective."""
    return Instruction(target, args, {}, tuple(_slots(args)), call_of(target, args, {}), result, name, line=line)


def instruction(
    node: fx.Node, slots: Mapping[fx.Node, int], device: torch.device, program: Program, here: Mapping[fx.Node, int]
) -> Instruction:
    """The instruction of a call; it may write over what is made ``here``, before at a negative place.

    ``here`` is empty where ops are recorded for a compiler, which chooses kernels. In a localized program collectives
    act.
    """
    assert node.op == "call_function" and callable(node.target), node.format_node()
    written = in_place(node, here, program, device)
    op, given_args = written or (node.target, node.args)
    is_bucket = node.target is bucket
    is_own = not is_bucket and bool(members(node)) and dies_at(operand(node), node, here)
    over = written[1][0] if written else operand(node) if is_own else None
    if op is dot:
        op, given_args = BoundDot(str(node.args[2])), node.args[:2]
    named = {name: value for name, value in node.kwargs.items() if isinstance(value, fx.Node)}
    plain = {name: value for name, value in node.kwargs.items() if name not in named}
    given = (*given_args, *named.values())
    args = _plain(fx.map_arg(given, lambda operand: Slot(slots[operand])))  # type: ignore[arg-type,return-value]
    found = op_rule(node.target)
    target = _with_dense(op) if found is not None and found.is_dense else op
    target = _of_contiguous(target) if node.target in TAKE_CONTIGUOUS else target
    target = _with_names(target, tuple(named)) if named else target
    method = _method(program, node) if program.level == "localized" else ""
    target = _foreign(target, node.name) if _is_foreign(node.target) else target
    plain |= {"device": device} if takes_device(node.target) else {}
    return Instruction(
        target,
        args,
        plain,
        tuple(_slots(args)),
        call_of(target, args, plain),
        slots[node],
        "" if is_getitem(node) or is_view(node) else range_name(program, node),
        method,
        BucketLayout.of(program, node) if method and is_bucket else None,
        is_bucket or is_own,
        -1 if over is None else next((slots[each] for each in looked_at(over) if here.get(each, 0) < 0), -1),
        line=program.source(node).location,
    )


def call_of(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Env], Any]:
    """The call as Python code that reads an ``Env``, which takes a fifth of the time of filling in a list."""
    known: dict[str, Any] = {}
    return eval(_code(f"lambda env: {expression(target, args, kwargs, known, 'env[{}]'.format)}"), known)


def expression(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: dict[str, Any],
    name_of: Callable[[int], str],
) -> str:
    """The text of a call, whose constants become ``known`` by name; ``name_of`` is what a slot is called in it."""

    def text(argument: Any) -> str:
        if isinstance(argument, Slot):
            return name_of(argument.index)
        if isinstance(argument, (list, tuple)) and any(True for _ in _slots(argument)):
            entries = "".join(f"{text(entry)}, " for entry in argument)
            return f"[{entries}]" if isinstance(argument, list) else f"({entries})"
        if argument is None or type(argument) in (int, bool):
            return repr(argument)
        name = f"constant{len(known)}"
        known[name] = argument
        return name

    op = text(target._op if isinstance(target, torch._ops.OpOverload) else target)
    return f"{op}({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


def _method(program: Program, node: fx.Node) -> str:
    """The method of ``Comm`` that runs a call; in groups of one, and where nothing is exchanged, it is an op."""
    if node.target in EXCHANGES:
        return EXCHANGES[node.target] if node.args[1] else ""
    assert program.mesh is not None
    parts = members(node)
    return parts[0].kind if parts and group_size(program.mesh, parts[0].kind, parts[0].args) > 1 else ""


def _is_foreign(target: Any) -> bool:
    """Whether an op is another library's: its kernel may take for granted how a tensor lies in memory."""
    is_op = isinstance(target, (torch._ops.OpOverload, Opaque))
    return is_op and getattr(target, "namespace", "") not in ("aten", "prims", "shardc", "_c10d_functional")


def _foreign(target: Callable[..., Any], place: str) -> Callable[..., Any]:
    """The op on operands that lie in memory as they are indexed; at its first run it must not draw random numbers."""
    runs = count()

    def call(*args: Any, **kwargs: Any) -> Any:
        args = pytree.tree_map_only(Tensor, Tensor.contiguous, args)
        if next(runs) or is_traced():
            return target(*args, **kwargs)
        before = torch.get_rng_state()
        result = target(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise ShardingError(
                place, "an op of your own",
                "it draws random numbers, which would depend on the rank",
                "give it the numbers as an operand, drawn in the model with torch",
            )  # fmt: skip
        return result

    return call


def _with_dense(target: Callable[..., Any]) -> Callable[..., Any]:
    """The op on tensors whose elements of the last dim are neighbours."""

    def dense(argument: Any) -> Any:
        is_spread = isinstance(argument, Tensor) and argument.ndim and argument.stride(-1) != 1
        return argument.contiguous() if is_spread else argument

    return lambda *args, **kwargs: target(*map(dense, args), **kwargs)


def _of_contiguous(target: Callable[..., Any]) -> Callable[..., Any]:
    """The op on contiguous copies of what is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)

    return call


def _with_names(target: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The op with its last arguments by position, which it takes by name alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        split = len(args) - len(names)
        return target(*args[:split], **dict(zip(names, args[split:], strict=True)), **kwargs)

    return call


def with_deaths(instructions: Sequence[Instruction], kept: Collection[int]) -> list[Instruction]:
    """The instructions, each with the slots that die after it; those ``kept`` never do."""
    seen, found = set(kept), []
    for each in reversed(instructions):
        used = {*each.reads, each.result}
        found.append(replace(each, dead=tuple(sorted(used - seen))))
        seen |= used
    return found[::-1]


def with_waits(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions, each with the slots of collectives that it is the first to read.

    Of reduce_scatters over the same axes no more than two are under way: operands are larger than what is made of them,
    and they live until it is done.
    """
    started: set[int] = set()
    latest: dict[object, tuple[int, ...]] = {}  # two reduce_scatters, by axes
    found = []
    for each in instructions:
        waits = started.intersection(each.reads)
        if each.collective == "reduce_scatter":
            axes = each.layout.parts[0].args[0] if each.layout else each.args[1]
            *older, last = *latest.get(axes, ()), each.result
            waits |= started.intersection(older[:-1])
            latest[axes] = (*older[-1:], last)
        found.append(replace(each, waits=tuple(sorted(waits))))
        started -= waits
        if each.collective:
            started.add(each.result)
    return found


def _slots(argument: Any) -> Iterator[int]:
    if isinstance(argument, Slot):
        yield argument.index
    elif isinstance(argument, (list, tuple)):
        for entry in argument:
            yield from _slots(entry)


def _plain(argument: Any) -> Any:
    """An immutable list of fx as an ordinary one, which ops take."""
    if isinstance(argument, tuple):
        return tuple(map(_plain, argument))
    return [_plain(entry) for entry in argument] if isinstance(argument, list) else argument


aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


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
