"""The values that collectives move, in terms of the user's model, so that two plans of one model can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from shardc.program.collective import COLLECTIVES, EXCHANGES
from shardc.program.communication import axes_of, bucket, collective_at, is_collective, members, results
from shardc.program.node import is_cast, is_getitem, op_name, operand
from shardc.program.program import Program


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value is moved in a phase, along a mesh axis, by a collective of some kind."""

    phase: str
    axis: str
    value: str
    kind: str

    @property
    def of_any_kind(self) -> Transfer:
        """The same transfer, whichever kind of collective does it."""
        return replace(self, kind="")


def transfers(program: Program) -> dict[str, frozenset[Transfer]]:
    """The transfers of each collective of a lowered program in global shapes, by the collective's name."""
    by_name = {}
    for node in filter(is_collective, program.calls):
        phase, kind = program.source(node).phase, collective_at(program, node).kind
        values = [_value_text(program, movement) for movement in movements(program, node)]
        by_name[node.name] = frozenset(Transfer(phase, axis, value, kind) for value in values for axis in axes_of(node))
    return by_name


def _value_text(program: Program, movement: Movement) -> str:
    """A value by the names of the user's model."""
    outputs = [program.outputs[i] for i in movement.outputs]
    if outputs:
        return ", ".join(dict.fromkeys(f"{output.kind} {output.name}" for output in outputs))
    for input_, node in zip(program.inputs, program.placeholders, strict=True):
        if node is movement.producer:
            return f"{input_.kind} {input_.name}"
    call, index = program.value(movement.producer)
    source, type_ = program.source(movement.producer), program.value_type((call, index))
    op = op_name(call.target) + (f"[{index}]" if call is not movement.producer else "")
    return " ".join(filter(None, (source.module, source.location, op, str(type_))))


def is_removed(before: frozenset[Transfer], after: frozenset[Transfer], altogether: bool = False) -> bool:
    """Whether a collective with the transfers ``before`` is gone from a plan with those ``after``.

    ``altogether``: collectives of another kind may not move its values either.
    """
    if altogether:
        return {each.of_any_kind for each in before}.isdisjoint(each.of_any_kind for each in after)
    return before.isdisjoint(after)


def replacement_kinds(before: frozenset[Transfer], after: frozenset[Transfer]) -> tuple[str, ...]:
    """The other kinds of collectives by which a plan with the transfers ``after`` moves the same values."""
    known = {each.of_any_kind for each in before}
    return tuple(sorted({each.kind for each in after - before if each.of_any_kind in known}))


@dataclass(frozen=True, slots=True)
class Movement:
    """One value that a collective moves.

    ``producer``: the node that computes it, before every step of the reshard. ``operand``: the collective's operand.
    ``result``: the last step of the reshard. ``users``: the readers of that; ``outputs``: the indices of the program's
    results among them.
    """

    producer: fx.Node
    operand: fx.Node
    result: fx.Node
    users: tuple[fx.Node, ...]
    outputs: tuple[int, ...]


def movements(program: Program, node: fx.Node) -> Iterator[Movement]:
    """The values that a collective moves: one, or those of a bucket."""
    parts = members(node)
    pairs = [(part.operand, list(results(node, part))) for part in parts] or [(operand(node), [node])]
    for moved, firsts in pairs:
        lasts = list(dict.fromkeys(last for each in firsts for last in _last_steps(program, each)))
        users = tuple(dict.fromkeys(user for last in lasts for user in last.users if not _is_step(program, user)))
        outputs = tuple(i for i, result in enumerate(program.results) if result in lasts)
        producer = moved  # the node before all steps of reshards, and before casts
        while producer.op == "call_function" and (_is_step(program, producer) or is_cast(producer)):
            value, index = program.value(producer)
            producer = operand(value, 3 + index) if _is_of_bucket(producer) else operand(producer)
        yield Movement(producer, moved, (lasts or firsts or [node])[0], users, outputs)


def _last_steps(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """The last steps of the reshards that a node is a step of: the steps with other users."""
    steps = [user for user in node.users if user.op != "output" and _is_step(program, user)]
    if len(steps) < len(node.users):
        yield node
    for step in steps:
        yield from _last_steps(program, step)


def _is_step(program: Program, node: fx.Node) -> bool:
    """Whether a node is part of a reshard: a collective, a view around one, or a result of a bucket."""
    if node.op != "call_function" or node.target in EXCHANGES:
        return False
    is_ours = node.target in COLLECTIVES or node.target is bucket or bool(program.causes(node))
    return is_ours or _is_of_bucket(node)


def _is_of_bucket(node: fx.Node) -> bool:
    return is_getitem(node) and operand(node).target is bucket
