"""A program's calls as instructions: resolved kernels, arguments by slot, and the slots that die after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from shardc.ops.contraction import BoundDot, dot
from shardc.program.collective import EXCHANGES, group_size
from shardc.program.communication import bucket, members
from shardc.program.lifetime import dies_at, view_chain
from shardc.program.node import is_getitem, is_view, operand, takes_device
from shardc.program.program import Program
from shardc.program.text import range_name

from ..comm.comm import BucketLayout
from .kernel import biased_products, custom, is_custom, overwriting, with_layout, with_names

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
    name, line = "" if is_getitem(node) or is_view(node) else range_name(program, node), program.source(node).location
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
        result.append(replace(each, dead=tuple(sorted(used - alive))))
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
        result.append(replace(each, waits=tuple(sorted(waits))))
        started -= waits
        if each.collective:
            started.add(each.result)
    return result
