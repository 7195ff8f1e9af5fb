"""strict: an error for whatever moves or runs whole although no annotation asked for it.

Two things offend. An op on the fallback, which is gathered and runs whole on every rank. An all_gather or all_to_all
that is not *requested*; it is requested where

- it ends in what the user placed: an annotated value, module output or program output, or the gradient or the new value
  of an annotated parameter, buffer or input, in the dims that it changes; or
- it gathers an annotated parameter or buffer over axes that cut dim 0, the batch, of an annotated input: weights that
  are stored in pieces between uses, as FSDP does; or it gathers what ``Zero`` stores; or
- it brings data that an annotation cuts over an axis to where annotated weights are cut over it and computed with, or
  brings it back: sequence parallelism, and experts.

Reductions, reduce_scatter among them, and exchanges of edges are what cut contractions and windows cost; they never
offend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError
from shardc.passes.order import SETTLED
from shardc.program.collective import COLLECTIVES, Collective, reshard
from shardc.program.communication import axes_of, collective_at, is_collective
from shardc.program.node import is_annotation, is_getitem, op_name, operand
from shardc.program.program import Pin, Program, Value, ends_of
from shardc.program.provenance import PARAMETER, PARAMETER_FIRST, YIELDING
from shardc.program.text import type_text

_STORED = ("parameter", "buffer")


def strict_offences(compiled: Compiled) -> list[ShardingError]:
    """An error for each offender of a compiled model, as the program stands once its collectives are settled."""
    settled = compiled.at(SETTLED)
    return offences(settled, [*settled.pins, *(pin for pin in compiled.program.pins if pin.kind == "value")])


def offences(program: Program, asked: Sequence[Pin]) -> list[ShardingError]:
    """An error for each offender, fallbacks first."""
    return [*_fallbacks(program), *_gathers(program, _Asked(program, asked))]


def _fallbacks(program: Program) -> Iterator[ShardingError]:
    collectives = [(node, collective_at(program, node)) for node in program.calls if is_collective(node)]
    for node in program.calls:
        if _is_fallback(program, node):
            moved = sum(found.wire_bytes for each, found in collectives if list(_users(program, each)) == [node])
            result = type_text(program, node)
            yield ShardingError(
                _place(program, node),
                f"{result}, for which one rank sends {moved} bytes",
                f"{node.target if hasattr(node.target, '_schema') else op_name(node.target)} has no rule: its operands "
                "are gathered, and it runs whole on every rank",
                "say which dims its tensors share with shardc.register_rule, or compute it without this op",
            )


def _is_fallback(program: Program, node: fx.Node) -> bool:
    is_ours = node.target in COLLECTIVES or node.target is reshard
    return not is_ours and program.rule(node).is_fallback


def _gathers(program: Program, asked: _Asked) -> Iterator[ShardingError]:
    for node in filter(is_collective, program.calls):
        found = collective_at(program, node)
        if found.kind not in ("all_gather", "all_to_all"):
            continue
        users = list(_users(program, node))
        if users and all(user.op != "output" and _is_fallback(program, user) for user in users):
            continue  # said of the fallback
        if not (asked.for_store(node) or asked.for_users(node, users) or asked.for_weights(node, users)):
            yield _unrequested(program, node, found)


def _unrequested(program: Program, node: fx.Node, found: Collective) -> ShardingError:
    moved, axes = operand(node), ", ".join(found.axes)
    (cause,) = found.causes
    came = [f"{axis} from {origin.annotation}" for axis, origin in cause.origins.items()]
    return ShardingError(
        _place(program, node),
        f"{found.kind} over {axes}, {type_text(program, moved)} to {type_text(program, node)}, "
        f"one rank sends {found.wire_bytes} bytes",
        f"no annotation asks for it: {cause.text}" + (f" ({', '.join(came)})" if came else ""),
        "annotate the value as it is wanted (shardc.annotate in the model, or a module's name), or change the "
        "annotation that it comes from",
    )


def _place(program: Program, node: fx.Node) -> str:
    """The node with the user's line and module; of a moved input those of the first op that uses it."""
    sources = map(program.source, [node, *_users(program, node)])
    source = next((source for source in sources if source.location), program.source(node))
    return f"{node.name} ({', '.join(filter(None, (source.location, source.module)))})"


def _users(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """Who uses what a collective made, in the end: further steps of the same reshard are looked through."""
    for user in node.users:
        is_step = user.op != "output" and (user.target in COLLECTIVES or program.causes(user))
        if is_step or is_getitem(user):
            yield from _users(program, user)
        else:
            yield user


class _Asked:
    """What the user placed, by the nodes that it is about."""

    def __init__(self, program: Program, pins: Sequence[Pin]) -> None:
        self.program = program
        placed = {(pin.kind, pin.name): pin for pin in pins}
        inputs = {node: placed[key] for key, node in program.named_inputs.items() if key in placed}
        self.stored = {node: pin for node, pin in inputs.items() if pin.kind in _STORED}
        self.by_zero = {program.named_inputs["parameter", name] for name in program.computed}
        self.batch_axes = {
            part.name for pin in pins if pin.kind == "input" and pin.sharding.dims
            for part in pin.sharding.dims[0].all_axes
        }  # fmt: skip
        self.values = {node: placed["value", node.name] for node in program.calls if ("value", node.name) in placed}
        self.results: dict[Value, list[Pin | None]] = {}
        for output, owner, result in ends_of(program):
            if result is not None:
                pin = inputs.get(owner) if owner else placed.get((output.kind, output.name))
                self.results.setdefault(program.value(result), []).append(pin)

    def for_store(self, node: fx.Node) -> bool:
        """Whether a gather brings together a weight that is kept in pieces over the axes of the batch."""
        source, zero = _stored_value(self.program, operand(node)), self.program.options.zero
        axes = set(axes_of(node))
        if zero is not None and source in self.by_zero and axes == {zero.axis}:
            return True
        return source in self.stored and axes <= self.batch_axes

    def for_users(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """Whether a gather ends in annotated values and results alone, in dims that the annotations say."""
        pins: list[Pin | None] = []
        for user in users:
            if user.op == "output":
                pins += [pin for last in _ends(node) for pin in self.results.get(self.program.value(last), ())]
            else:
                pins.append(self.values.get(user) if is_annotation(user) else None)
        dims = {dim for dim in node.args[2:] if isinstance(dim, int)}
        return bool(pins) and all(pin is not None and not dims & pin.open for pin in pins)

    def for_weights(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """Whether data yields to weights over the axes, or the weights' side gives it back (ranks: passes/pins.py)."""
        axes = axes_of(node)
        calls = [user for user in users if user.op == "call_function"]
        return bool(axes) and all(self._yields(operand(node), calls, axis) for axis in axes)

    def _yields(self, moved: fx.Node, users: Sequence[fx.Node], axis: str) -> bool:
        came = self.program.origin(moved).get(axis)
        if came is None or came.rank == PARAMETER:
            return False
        ranks = [{found[axis].rank for found in self.program.origins(user) if axis in found} for user in users]
        to = PARAMETER if came.rank == YIELDING else PARAMETER_FIRST
        return came.rank == PARAMETER_FIRST or (bool(ranks) and all(to in each for each in ranks))


def _ends(node: fx.Node) -> Iterator[fx.Node]:
    """The node and the collectives that follow it."""
    yield node
    for user in node.users:
        if user.target in COLLECTIVES:
            yield from _ends(user)


def _stored_value(program: Program, node: fx.Node) -> fx.Node:
    """The input that a value is a view or a cast of, or a step of the same gather; else the node."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        is_step = node.target in COLLECTIVES
        if not is_step and program.rule(node).is_fallback:
            break
        node = node.all_input_nodes[0]
    return node
