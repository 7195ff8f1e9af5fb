"""The answer of ``explain`` as data and text: chains from annotations to a value, and how chains are followed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import fx

from shardc.language.text import aligned, bytes_text, folded, over_calls, printable, seconds_text, table
from shardc.program.collective import COLLECTIVES
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.program.provenance import Origin
from shardc.program.text import op_names, type_text, value_names
from shardc.report.explain.records import Chain, ChainStep, ExplanationEntry, Reason, Role, Side, Subject, Transmission

REPLICATED = "default: replicated"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something of a program is as it is.

    ``name`` reads as in the dump. ``chains``: one for each axis that cuts it, or over which a sum is open; of a
    collective, one for each axis that it acts over. ``placed``: the annotation of the value itself, if there is one.
    ``sent``, ``has``, ``wants``, ``reasons``: of a collective. ``notes``: further sentences. ``parts``: of a module its
    results and then its collectives, of a stage its collectives, of a bucket its members, of a message its values.
    """

    name: str
    kind: Subject
    type: str = ""
    module: str = ""
    location: str = ""
    chains: tuple[Chain, ...] = ()
    placed: str = ""
    sent: Transmission | None = None
    has: Side | None = None
    wants: Side | None = None
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The annotations and options that it comes from; ``default: replicated`` where there is none."""
        ends = [chain.end for chain in self.chains] + [self.placed] + [reason.end for reason in self.reasons]
        ends += [end for part in self.parts for end in part.ends if end != REPLICATED]
        return tuple(dict.fromkeys(filter(None, ends))) or (REPLICATED,)

    def text(self, most: int | None = 10) -> str:
        """The text form. Chains of more than ``most`` steps are shortened in the middle; None prints them whole."""
        return "\n".join(map(printable, _lines(self, most))) + "\n"

    def record(self) -> ExplanationEntry:
        """The record, with those of its parts."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return ExplanationEntry(**{**own, "parts": tuple(part.record() for part in self.parts), "ends": self.ends})


REASONS = {
    "sum": "each rank along {axis} has a part of the sum, and {user} needs it added up",
    "readers": "each rank along {axis} has a part of the sum, which is added up once for all that read it",
    "whole": "{axis} cuts dim {dim}, which {user} needs whole",
    "fallback": "{axis} cuts dim {dim}, and {op} has no rule: it runs whole on every rank",
    "taken": "{axis} cuts dim {dim}, but in {user} it cuts another dim, as {end} has it",
    "unfit": "{axis} cuts dim {dim}, and {op} cannot be computed in such pieces",
    "fewest": "{axis} cuts dim {dim}; of the ways to compute {user} in pieces this one sends the fewest bytes",
    "placed": "{axis} cuts dim {dim}, where {end} has it whole",
    "end": "{axis} cuts dim {dim}, where {user} is not cut",
    "cut": "{axis} cuts dim {dim} of what {user} takes, as {end} has it",
    "edges": "{axis} cuts a dim of which {user} reads what lies next to each piece",
    "stored": "{end} keeps it cut over {axis} between uses",
    "crossed": "{end} puts what makes it and what reads it into different stages",
    "stages": "{end} cuts the model in stages along {axis}",
}
ROLES = {
    "made": "made by",
    "summed": "summed by",
    "passed": "through",
    "read": "read by",
    "wanted": "wanted by",
    "moved": "moved by",
    "repeated": "again by",
}


def reason_text(reason: Reason, reader: Side | None) -> str:
    """A sentence that says why a value has to change its sharding for its ``reader``."""
    name, op = (reader.name, reader.op or reader.name) if reader else ("what reads it", "what reads it")
    return REASONS[reason.kind].format(axis=reason.axis, dim=reason.dim, end=reason.end, user=name, op=op)


# Text.


def _lines(explanation: Explanation, most: int | None) -> Iterator[str]:
    """The lines of an explanation, with its body and its parts indented."""
    e, sent = explanation, explanation.sent
    if sent:
        of_stage = "" if sent.stage is None else f" of stage {sent.stage}"
        times = f", {sent.times} times a step" if sent.times > 1 else ""
        wire = f"{bytes_text(sent.wire_bytes)} on the wire a rank{times}, about {seconds_text(sent.seconds)}"
        yield f"{e.name}: {sent.kind} over {', '.join(sent.axes)}, {sent.phase}{of_stage}, {wire}"
    else:
        yield f"{e.kind} {e.name}" + (f": {e.type}" if e.type else "") + _place(e.module, e.location)
    yield from (f"  {line}" for line in _body(e, most))
    yield from (f"  {line}" for line in _parts(e, most))


def _body(explanation: Explanation, most: int | None) -> Iterator[str]:
    rows = []
    for title, side in (("has", explanation.has), ("wants", explanation.wants)):
        if side is not None:
            operand = "" if side.operand is None else f"as operand {side.operand} of {side.op}"
            words = " ".join(filter(None, (operand, _place(side.module, side.location).strip())))
            rows.append((f"{title:5}", side.name, side.type, words))
    yield from aligned(rows)
    taken = {(reason.axis, reason.end) for reason in explanation.reasons if reason.kind == "taken"}
    for reason in explanation.reasons:
        if reason.kind != "cut" or (reason.axis, reason.end) not in taken:  # which says the same
            yield f"because {reason_text(reason, explanation.wants)}"
    placed = explanation.placed
    if placed and not any(chain.end == placed for chain in explanation.chains):
        yield f"annotated {placed}"
    ways: dict[object, list[Chain]] = {}
    for chain in explanation.chains:
        ways.setdefault((chain.end, chain.steps), []).append(chain)
    for same in ways.values():  # axes that came the same way are one chain
        yield from _chain_lines(same[0], " and ".join(chain.axis for chain in same), most)
    if explanation.ends == (REPLICATED,) and (explanation.type or explanation.parts):
        yield f"{REPLICATED}, since no annotation reaches it"
    yield from explanation.notes


def _chain_lines(chain: Chain, axes: str, most: int | None) -> Iterator[str]:
    yield f"{axes} come{'' if ' and ' in axes else 's'} from {chain.end}"
    steps, first, left_out = chain.steps, 0, 0
    if most is not None and len(steps) > most:
        first, left_out = most // 3, len(steps) - most
        steps = (*steps[:first], *steps[first + left_out :])
    rows = []
    for step in steps:
        call = step.call if step.call.startswith(step.via) else f"{step.call}, {step.via}"  # a name mostly says the op
        op = step.via if step.call in ("", step.value) else call
        way = f"since {step.via} is cut so"
        if step.role != "tied":
            way = "" if step.role == "annotated" else f"{ROLES[step.role]} {op}{_place(step.module, step.location)}"
        rows.append((step.value, step.type, way))
    for i, line in enumerate(aligned(rows)):
        if left_out and i == first:
            yield f"  ... {left_out} more"
        yield f"  {line}"


def _place(module: str, location: str) -> str:
    words = ", ".join(filter(None, (module, location)))
    return f" ({words})" if words else ""


def _parts(explanation: Explanation, most: int | None) -> Iterator[str]:
    """The parts: results of a module whole, collectives in one line each; of a long bucket the first member whole."""
    if explanation.kind in ("module", "stage"):
        whole = [part for part in explanation.parts if part.kind != "collective"]
        header: tuple[str, ...] = ("it sends", "axes", "phase", "wire bytes", "of", "from", "time")
        rows = [_collective_row(part) for part in explanation.parts if part.kind == "collective"]
    else:
        count = len(explanation.parts) if most is None or len(explanation.parts) <= 2 else 1
        whole, header = list(explanation.parts[:count]), ("and likewise", "of", "for", "from")
        rows = []
        for part in explanation.parts[count:]:
            sides = [side.name if side else "" for side in (part.has, part.wants)]
            rows.append((part.name, *sides, "; ".join(part.ends)))
    for part in whole:
        yield from _lines(part, most)
    yield from table(header, folded(rows, alike=over_calls)).splitlines()


def _collective_row(part: Explanation) -> tuple[object, ...]:
    """A collective in one line. A member of a bucket is sent with others and has no time of its own."""
    sent, of, ends = part.sent, part.has.name if part.has else "", "; ".join(part.ends)
    if sent is None:
        return part.name, "", "", "", of, ends, "; ".join(part.notes)
    return part.name, "+".join(sent.axes), sent.phase, bytes_text(sent.wire_bytes), of, ends, seconds_text(sent.seconds)


class Chains:
    """The chains of one program, from the origins that propagation recorded at its values.

    ``names``: the printed name of each node; ``nodes``: the nodes by their own names. A chain that an early pass
    recorded may name a node that another node has replaced since.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = value_names(program)
        self.nodes = {node.name: node for node in program.graph.nodes if node.op != "output"}
        former = ((name, node) for node in program.graph.nodes for name in program.former_names(node))
        self._known = {**dict(reversed(list(former))), **self.nodes}
        self._ops = op_names(program)
        self._steps: dict[tuple[int, str], ChainStep] = {}  # chains share their first steps

    def node(self, name: str) -> fx.Node | None:
        """The node of a name, or the node that replaced it; None where there was none."""
        return self._known.get(name)

    def op(self, node: fx.Node) -> str:
        """The op that a node calls, as the dump prints it."""
        return self._ops.get(node.target, "")

    def side(self, node: fx.Node) -> Side:
        """A node as the producer of what a collective sends."""
        source = self.program.source(node)
        type_ = type_text(self.program, node)
        return Side(self.names[node], type_, self.op(node), None, source.module, source.location)

    def of(self, node: fx.Node) -> Iterator[Chain]:
        """One chain for each axis that cuts a node's value, or over which a sum is open."""
        producer, index = self.program.value(node)
        indices = range(len(self.program.types(node))) if producer is node else [index]
        shardings, origins = self.program.shardings(producer), self.program.origins(producer)
        chains: dict[str, Chain] = {}
        for i in indices if shardings else ():
            sharding = shardings[i]
            for part in () if sharding is None else (*sharding.partial_axes, *sharding.cut_axes):
                if part.name in origins[i]:
                    chains.setdefault(part.name, self.chain(part.name, origins[i][part.name], node))
                    for other in origins[i][part.name].further_annotations:
                        chains.setdefault(other.annotation, self.chain(part.name, other))
        yield from chains.values()

    def chain(self, axis: str, origin: Origin, to: fx.Node | None = None) -> Chain:
        """The chain to the value of an origin, and on to the node ``to``, which holds or reshards that value."""
        steps = [self._step(each, axis) for each in origin.chain]
        if to is not None and steps[-1].value != self.names[to]:
            before, call = self._known.get(origin.value[0]), self.program.value(to)[0]
            is_reshard = call.target in COLLECTIVES or bool(self.program.causes(call))  # also a view in a reshard
            is_same_op = before is not None and before.target == call.target and call.op == "call_function"
            role: Role = "moved" if is_reshard else "repeated" if is_same_op else "made"
            if call.name != origin.value[0]:
                steps.append(self._step_through(call, self.names[to], type_text(self.program, to), role))
        return Chain(axis, origin.annotation, tuple(steps))

    def _step(self, origin: Origin, axis: str) -> ChainStep:
        key = id(origin), axis
        if key not in self._steps:
            self._steps[key] = self._new_step(origin, axis)
        return self._steps[key]

    def _new_step(self, origin: Origin, axis: str) -> ChainStep:
        holder, via = self._printed_node(*origin.value), self._known.get(origin.via)
        value = origin.value[0] if holder is None else self.names[holder]
        type_ = "" if holder is None else type_text(self.program, holder)
        if origin.previous is None:
            return ChainStep(value, type_, "annotated")
        if via is None:
            return ChainStep(value, type_, "tied" if " " in origin.via else "read", origin.via)
        sharding = None if holder is None or self.program.has_many(holder) else self.program.sharding(holder)
        is_cut = sharding is None or axis in {part.name for part in sharding.cut_axes}
        if origin.value[0] != origin.via:  # an operand of the op
            role: Role = "read" if is_cut else "wanted"
        elif is_cut or not self._is_open(holder, axis):
            role = "made" if is_cut else "passed"
        else:  # a sum that was open already is passed on
            role = "made" if self._is_open(self._printed_node(*origin.previous.value), axis) else "summed"
        return self._step_through(via, value, type_, role)

    def _is_open(self, node: fx.Node | None, axis: str) -> bool:
        """Whether a sum over an axis is open in a node's value."""
        if node is None or self.program.has_many(node):
            return False
        return axis in {part.name for part in self.program.sharding(node).partial_axes}

    def _step_through(self, node: fx.Node, value: str, type_: str, role: Role) -> ChainStep:
        source = self.program.source(node)
        return ChainStep(value, type_, role, self.op(node), node.name, source.module, source.location)

    def _printed_node(self, name: str, index: int) -> fx.Node | None:
        """The node that the dump prints for one result of a node."""
        node = self._known.get(name)
        if node is None or not self.program.has_many(node):
            return node
        return next((user for user in node.users if is_getitem(user) and user.args[1] == index), node)
