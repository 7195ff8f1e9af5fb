"""The answer of ``explain`` as data and text. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Literal

from shardc.language.machine import SentKind
from shardc.language.record import Amount, Count, Size
from shardc.language.text import aligned, bytes_text, folded, over_calls, printable, seconds_text, table
from shardc.program.provenance import NeedKind, Phase

Subject = Literal[
    "parameter", "buffer", "input", "value", "output", "gradient", "module", "stage", "annotation", "collective"
]
Role = Literal["annotated", "made", "summed", "passed", "read", "wanted", "tied", "moved", "repeated"]
ReasonKind = Literal[NeedKind, "crossed", "stored", "edges", "keys", "heads", "positions", "stages"]

REPLICATED = "default: replicated"


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A value that an axis cuts, or over which a sum is open, and how the axis came to it.

    ``value``: as in the dump. ``type``: with its sharding. ``role``: one of

    - annotated: the user annotated the value
    - made: the op computes it in pieces along the axis; summed: the op leaves a sum over the axis open
    - passed: the axis passed through the op, which is not computed in pieces in the end
    - read: the op reads it beside the value before, so that both are cut alike; wanted: the op needs it cut, and it is
      resharded
    - tied: it is cut as another value is, as a gradient is as its parameter
    - moved: it is the value before, resharded; repeated: the value before, computed again

    ``via``: the op that the axis came through. ``call``: the op's node in the dump. ``module``: of the op, the path.
    ``location``: of the op, file.py:line.
    """

    value: str
    type: str
    role: Role
    via: str = ""
    call: str = ""
    module: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """How an axis came from an annotation or an option to a value.

    ``end``: the annotation or the option. ``steps``: the first is the annotated value.
    """

    axis: str
    end: str
    steps: tuple[ChainStep, ...]


@dataclass(frozen=True, slots=True)
class Transmission:
    """What a collective sends, each of its times a step; bytes are those of one rank.

    ``seconds``: predicted, on the machine that was compiled for. ``stage``: of a pipeline, which runs it. ``codec``: of
    what is sent in codes.
    """

    kind: SentKind
    axes: tuple[str, ...]
    phase: Phase
    bytes: Count
    wire_bytes: Count
    seconds: Amount
    stage: int | None
    times: Size
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a collective: the producer of its operand, or the reader of its result.

    ``name``: as in the dump, or a result of the program such as the gradient w. ``type``: what the producer has or the
    reader needs. ``op``: what it calls. ``operand``: which operand the value is, from 0.
    """

    name: str
    type: str
    op: str
    operand: int | None
    module: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a value has to change its sharding over an axis.

    ``dim``: of the value. ``end``: the annotation or option that causes it, where that is not the one of the chain.
    """

    axis: str
    kind: ReasonKind
    dim: int | None
    end: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something of a program is as it is.

    ``name``: as the dump has it. ``type``: as f32[8@dp, 64]{sum tp}. ``module``: the path of the user's module.
    ``location``: the user's line, file.py:line. ``chains``: one for each axis that cuts it, over which a sum is open,
    or over which it is sent. ``placed``: the annotation of the value itself, if there is one. ``sent``, ``reasons``: of
    a collective. ``has``: of a collective, what makes the value. ``wants``: of a collective, what takes it.
    ``notes``: further sentences. ``parts``: of a module what it returns, then what it sends; of a bucket its members.
    ``ends``: the annotations and options that it comes from, or default: replicated.
    """

    name: str
    kind: Subject
    type: str = ""
    module: str = ""
    location: str = ""
    chains: tuple[Chain, ...] = ()
    placed: str = ""
    sent: Transmission | None = field(default_factory=NoneType)  # null in JSON; a plain None would be left out
    has: Side | None = field(default_factory=NoneType)
    wants: Side | None = field(default_factory=NoneType)
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()
    ends: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = [chain.end for chain in self.chains] + [self.placed] + [reason.end for reason in self.reasons]
        ends += [end for part in self.parts for end in part.ends if end != REPLICATED]
        object.__setattr__(self, "ends", tuple(dict.fromkeys(filter(None, ends))) or (REPLICATED,))

    def __repr__(self) -> str:
        return self.text().rstrip()

    def text(self, most: int | None = 10) -> str:
        """The text form. Chains of more than ``most`` steps are shortened in the middle; None prints them whole."""
        return "\n".join(map(printable, _lines(self, most))) + "\n"


# Text.


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
    "keys": "{axis} cuts the positions, and {user} sees keys of others, which go from rank to rank",
    "heads": "ranks along {axis} that are neighbours share the heads of attention: each takes some of them, with the "
    "positions of all, as attention= says",
    "positions": "ranks along {axis} that are neighbours share the heads of attention, and its result comes back",
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


def _lines(explanation: Explanation, most: int | None) -> Iterator[str]:
    """The lines of an explanation, with its body and its parts indented."""
    e, sent = explanation, explanation.sent
    if sent:
        of_stage = "" if sent.stage is None else f" of stage {sent.stage}"
        times = f", {sent.times} times a step" if sent.times > 1 else ""
        codes = f" as {sent.codec}" if sent.codec else ""
        wire = f"{bytes_text(sent.wire_bytes)} on the wire a rank{codes}{times}, about {seconds_text(sent.seconds)}"
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
        if reason.kind != "cut" or (reason.axis, reason.end) not in taken:  # "taken" says the same
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
        call = step.call if step.call.startswith(step.via) else f"{step.call}, {step.via}"  # names mostly say the op
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
    """The parts: results of a module in full, collectives in a line each; of a long bucket only one member in full."""
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
