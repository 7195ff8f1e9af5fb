"""``strict``: errors for values that are gathered and ops that run whole although no annotation asks for it.

There are two offences: an op without a rule, whose operands are gathered and which runs whole on every rank; and an
all_gather or all_to_all that is not *requested*. It is requested if

- it leads to a sharding that the user annotated, in the dims that it changes: that of an annotated value, module output
  or program output, or of the gradient or new value of an annotated parameter, buffer or input;
- it gathers an annotated parameter or buffer over axes that cut dim 0, the batch, of an annotated input (weights that
  are stored in pieces between uses, as FSDP does), or it gathers a parameter that ``Zero`` stores;
- it moves data that an annotation cuts over an axis to where annotated weights are cut over it, or moves it back:
  sequence parallelism, and experts.

Reductions, reduce_scatters among them, and exchanges of edges are the cost of cut contractions and windows. They never
offend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError
from shardc.language.text import bytes_text
from shardc.passes.order import SETTLED
from shardc.program.collective import COLLECTIVES, reshard
from shardc.program.communication import axes_of, collective_at, is_collective
from shardc.program.node import is_annotation, is_getitem, op_name, operand
from shardc.program.program import Pin, Program, Value, ends_of
from shardc.program.provenance import PARAMETER, PARAMETER_FIRST, YIELDING
from shardc.program.text import type_text


def strict_offences(compiled: Compiled) -> list[ShardingError]:
    """An error for each offence of a compiled model, in the program whose collectives are settled; fallbacks first."""
    settled = compiled.at(SETTLED)
    pins = [*settled.pins, *(pin for pin in compiled.program.pins if pin.kind == "value")]
    return [*_fallbacks(settled), *_unrequested_gathers(settled, _Requests(settled, pins))]


def _fallbacks(program: Program) -> Iterator[ShardingError]:
    collectives = [(node, collective_at(program, node)) for node in program.calls if is_collective(node)]
    for node in program.calls:
        if _is_fallback(program, node):
            sent = sum(each.wire_bytes for other, each in collectives if list(_users(program, other)) == [node])
            name = node.target if hasattr(node.target, "_schema") else op_name(node.target)
            yield ShardingError(
                _place(program, node),
                f"{type_text(program, node)}, for which one rank sends {bytes_text(sent)}",
                f"{name} has no rule: its operands are gathered, and it runs whole on every rank",
                "say which dims its tensors share with shardc.register_rule, or compute it without this op",
            )


def _is_fallback(program: Program, node: fx.Node) -> bool:
    is_ours = node.target in COLLECTIVES or node.target is reshard
    return not is_ours and program.rule(node).is_fallback


def _unrequested_gathers(program: Program, requests: _Requests) -> Iterator[ShardingError]:
    for node in filter(is_collective, program.calls):
        collective = collective_at(program, node)
        if collective.kind not in ("all_gather", "all_to_all"):
            continue
        users = list(_users(program, node))
        if users and all(user.op != "output" and _is_fallback(program, user) for user in users):
            continue  # the fallback is listed already
        if requests.is_stored(node) or requests.is_for_users(node, users) or requests.is_for_weights(node, users):
            continue
        axes, sent = ", ".join(collective.axes), f"one rank sends {bytes_text(collective.wire_bytes)}"
        types = f"{type_text(program, operand(node))} to {type_text(program, node)}"
        (cause,) = collective.causes
        origins = ", ".join(f"{axis} from {origin.annotation}" for axis, origin in cause.origins.items())
        yield ShardingError(
            _place(program, node),
            f"{collective.kind} over {axes}, {types}, {sent}",
            f"no annotation asks for it: {cause.text}" + (f" ({origins})" if origins else ""),
            "annotate the value as it is wanted (shardc.annotate in the model, or a module's name), or change the "
            "annotation that it comes from",
        )


def _place(program: Program, node: fx.Node) -> str:
    """The node with its line and module; for a moved input, those of the first op that uses it."""
    sources = map(program.source, [node, *_users(program, node)])
    source = next((source for source in sources if source.location), program.source(node))
    return f"{node.name} ({', '.join(filter(None, (source.location, source.module)))})"


def _users(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """The users of a collective's result, behind further steps of the same reshard."""
    for user in node.users:
        is_step = user.op != "output" and (user.target in COLLECTIVES or program.causes(user))
        if is_step or is_getitem(user):
            yield from _users(program, user)
        else:
            yield user


class _Requests:
    """The shardings that the user annotated, by node."""

    def __init__(self, program: Program, pins: Sequence[Pin]) -> None:
        self.program = program
        placed = {(pin.kind, pin.name): pin for pin in pins}
        inputs = {node: placed[key] for key, node in program.named_inputs.items() if key in placed}
        self.stored = {node for node, pin in inputs.items() if pin.kind in ("parameter", "buffer")}
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

    def is_stored(self, node: fx.Node) -> bool:
        """Whether a gather collects a weight that is stored in pieces over the axes of the batch, or by ZeRO."""
        axes, zero, source = set(axes_of(node)), self.program.options.zero, operand(node)
        # go back through views, casts and steps of the same gather to the input
        while source.op == "call_function" and len(source.all_input_nodes) == 1:
            if source.target not in COLLECTIVES and self.program.rule(source).is_fallback:
                break
            source = source.all_input_nodes[0]
        if zero is not None and source in self.by_zero and axes <= set(zero.axes):
            return True
        return source in self.stored and axes <= self.batch_axes

    def is_for_users(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """Whether a gather leads to annotated values and results alone, in dims that the annotations fix."""
        pins: list[Pin | None] = []
        for user in users:
            if user.op == "output":
                pins += [pin for last in _steps_from(node) for pin in self.results.get(self.program.value(last), ())]
            else:
                pins.append(self.values.get(user) if is_annotation(user) else None)
        dims = {dim for dim in node.args[2:] if isinstance(dim, int)}
        return bool(pins) and all(pin is not None and not dims & pin.open for pin in pins)

    def is_for_weights(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """Whether data moves to weights over all axes of a gather, or moves back (ranks: propagate.py)."""
        origins = [self.program.origins(user) for user in users if user.op == "call_function"]
        for axis in axes_of(node):
            origin = self.program.origin(operand(node)).get(axis)
            if origin is None or origin.rank == PARAMETER:
                return False
            ranks = [{of_axes[axis].rank for of_axes in of_user if axis in of_axes} for of_user in origins]
            dst = PARAMETER if origin.rank == YIELDING else PARAMETER_FIRST
            if origin.rank != PARAMETER_FIRST and not (ranks and all(dst in each for each in ranks)):
                return False
        return bool(axes_of(node))


def _steps_from(node: fx.Node) -> Iterator[fx.Node]:
    """A collective and the collectives that follow it."""
    yield node
    for user in node.users:
        if user.target in COLLECTIVES:
            yield from _steps_from(user)
