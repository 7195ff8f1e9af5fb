"""What a collective moves, said so that it is found again when the model is compiled under other annotations.

Names of nodes do not last: another plan has other ops. What lasts is the user's: a collective is the *transfers* of the
values that it moves (a bucket moves several), one for each axis that it goes over. A transfer is that of a value, in a
phase, along an axis; and a value is the gradient, output or buffer that it ends as, or the parameter or input that it
is, or else what an op on a line of a module makes, of a global type. A collective is removed where no collective of its
kind has any of its transfers; of several values that an op makes on one line, as q, k and v, all must be gone. It is
removed *altogether* where no collective of any kind has them: an all_reduce that became a reduce_scatter is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from shardc.announcement import collective_at, is_collective
from shardc.bucket import axes_of, bucket, members, results
from shardc.collective import COLLECTIVES, EXCHANGES
from shardc.node import is_cast, is_getitem, op_name, operand
from shardc.program import Program


@dataclass(frozen=True, slots=True)
class Transfer:
    """That of a value, in a phase, along a mesh axis, by a collective of a kind."""

    phase: str
    axis: str
    value: str
    kind: str

    @property
    def of_any_kind(self) -> Transfer:
        """The same, whichever kind of collective does it."""
        return replace(self, kind="")


def is_removed(moved: frozenset[Transfer], left: frozenset[Transfer], altogether: bool = False) -> bool:
    """Whether a collective of the transfers ``moved`` is gone from a plan that has those ``left``."""
    if altogether:
        return {each.of_any_kind for each in moved}.isdisjoint(each.of_any_kind for each in left)
    return moved.isdisjoint(left)


@dataclass(frozen=True, slots=True)
class Movement:
    """One value that a collective moves.

    ``made``: the node that made it. ``moved``: what the collective takes. ``come``: the last of the steps by which it
    comes to how it is wanted. ``users``: who wants it so; ``ends``: the indices of the program's results among them.
    """

    made: fx.Node
    moved: fx.Node
    come: fx.Node
    users: tuple[fx.Node, ...]
    ends: tuple[int, ...]


def instead(moved: frozenset[Transfer], left: frozenset[Transfer]) -> tuple[str, ...]:
    """The kinds of collectives by which a plan that has the transfers ``left`` moves what was moved by another kind."""
    known = {each.of_any_kind for each in moved}
    return tuple(sorted({each.kind for each in left - moved if each.of_any_kind in known}))


def transfers(program: Program) -> dict[str, frozenset[Transfer]]:
    """Those of each collective of a lowered program in global shapes, by the collective's name."""
    return {node.name: frozenset(transfers_of(program, node)) for node in program.calls if is_collective(node)}


def transfers_of(program: Program, node: fx.Node) -> Iterator[Transfer]:
    """The transfers of one collective."""
    phase, kind = program.source(node).phase, collective_at(program, node).kind
    for movement in movements(program, node):
        value = value_text(program, movement)
        yield from (Transfer(phase, axis, value, kind) for axis in axes_of(node))


def movements(program: Program, node: fx.Node) -> Iterator[Movement]:
    """What a collective moves: one value, or those of a bucket."""
    parts = members(node)
    pairs = [(part.operand, list(results(node, part))) for part in parts] or [(operand(node), [node])]
    for moved, made in pairs:
        lasts = list(dict.fromkeys(last for each in made for last in _lasts(program, each)))
        users = tuple(dict.fromkeys(user for last in lasts for user in last.users if not _is_step(program, user)))
        ends = tuple(i for i, result in enumerate(program.results) if result in lasts)
        yield Movement(_maker(program, moved), moved, (lasts or made or [node])[0], users, ends)


def value_text(program: Program, movement: Movement) -> str:
    """A value by the names of the user's model."""
    ends = [program.outputs[i] for i in movement.ends]
    if ends:
        return ", ".join(dict.fromkeys(f"{end.kind} {end.name}" for end in ends))
    made = movement.made
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if node is made:
            return f"{given.kind} {given.name}"
    source, type_ = program.source(made), program.value_type(program.value(made))
    producer, index = program.value(made)
    op = op_name(producer.target) + (f"[{index}]" if producer is not made else "")
    return " ".join(filter(None, (source.module, source.location, op, str(type_))))


def _maker(program: Program, node: fx.Node) -> fx.Node:
    """The node behind the steps of a reshard and casts."""
    while node.op == "call_function" and (_is_step(program, node) or is_cast(node)):
        node = operand(program.value(node)[0], 3 + program.value(node)[1]) if _is_bucketed(node) else operand(node)
    return node


def _lasts(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """The last steps of the reshards that a node is a step of: those that have other users."""
    steps = [user for user in node.users if user.op != "output" and _is_step(program, user)]
    if len(steps) < len(node.users):
        yield node
    for step in steps:
        yield from _lasts(program, step)


def _is_step(program: Program, node: fx.Node) -> bool:
    """Whether a node is part of a reshard: a collective, a view around one, or a value picked of a bucket."""
    if node.op != "call_function" or node.target in EXCHANGES:
        return False
    is_ours = node.target in COLLECTIVES or node.target is bucket or bool(program.causes(node))
    return is_ours or _is_bucketed(node)


def _is_bucketed(node: fx.Node) -> bool:
    return is_getitem(node) and operand(node).target is bucket
