"""What ``explain`` answers, as data: the way from annotations to a value, and why a collective is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardc.language.text import table

Kind = Literal[
    "parameter", "buffer", "input", "value", "output", "gradient", "module", "stage", "annotation", "collective"
]
Role = Literal["annotated", "made", "summed", "passed", "read", "wanted", "tied", "moved", "repeated"]
REPLICATED = "default: replicated"


@dataclass(frozen=True, slots=True)
class Step:
    """A value that an axis came to cut, or over which a sum came to be open.

    ``value`` reads as in the dump, ``type`` with its sharding. ``role``: the user said so; or it is made by the op
    ``via``, of what the axis cuts; or is a sum over that; or the axis only ``passed``, since ``via`` is not computed in
    pieces in the end; or it is read by ``via`` beside it, so that both are cut alike; or ``via`` wants it so, and it is
    moved; or it is ``tied``, as a gradient is to its parameter; or it is the value before, ``moved`` or made again.
    ``call``: the op's node in the dump; ``module`` and ``location``: its place in the user's model.
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
    """How an axis came from an annotation, or an option, that ``end`` names, to a value: first what is annotated."""

    axis: str
    end: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a collective sends: ``bytes`` and ``wire_bytes`` of one rank, each of its ``times`` a step.

    ``seconds``: the estimate for the machine that was compiled for. ``stage``: of a pipeline, which runs it.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    bytes: int
    wire_bytes: int
    seconds: float
    stage: int | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class End:
    """One end of a collective: what makes the value, or what takes it.

    ``name`` reads as in the dump, or names an end of the program such as ``the gradient w``. ``type``: what it has or
    wants. ``op``: what it calls; ``operand``: which of its operands the value is, from 0.
    """

    name: str
    type: str
    op: str = ""
    operand: int | None = None
    module: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a value may not stay as it is over an axis; ``kind`` as ``Need`` has it, or of another cause.

    ``dim``: of the value. ``end``: the annotation or option whose doing it is, where that is not the chain's own.
    """

    axis: str
    kind: str
    dim: int | None = None
    end: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something of a program is as it is.

    ``name`` reads as in the dump. ``chains``: one for each axis that cuts it, or over which a sum is open; of a
    collective, for each axis that it acts over. ``placed``: the annotation that is about it itself, if there is one.
    ``sent``, ``has``, ``wants``, ``reasons``: of a collective. ``parts``: of a module what it returns and then what it
    sends, of a stage what it sends, of a bucket its members, of a message between stages its values. ``notes``: what
    else is to be known.
    """

    name: str
    kind: Kind
    type: str = ""
    module: str = ""
    location: str = ""
    chains: tuple[Chain, ...] = ()
    placed: str = ""
    sent: Sent | None = None
    has: End | None = None
    wants: End | None = None
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The annotations, or options, that it comes from; ``default: replicated`` where there is none."""
        found = [chain.end for chain in self.chains] + [self.placed] + [reason.end for reason in self.reasons]
        found += [end for part in self.parts for end in part.ends if end != REPLICATED]
        return tuple(dict.fromkeys(filter(None, found))) or (REPLICATED,)

    def text(self, most: int | None = 10) -> str:
        """For a reader; of a longer chain than ``most`` steps the middle is left out, with None nothing is."""
        return "\n".join(explanation_lines(self, most)) + "\n"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "parts": [part.record() for part in self.parts], "ends": self.ends}


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


WORDS = {
    "made": "made by",
    "summed": "summed by",
    "passed": "through",
    "read": "read by",
    "wanted": "wanted by",
    "moved": "moved by",
    "repeated": "again by",
}
SENT = ("it sends", "axes", "phase", "wire bytes", "of", "from", "time")


def explanation_lines(found: Explanation, most: int | None) -> Iterator[str]:
    """The lines of an explanation, its parts indented."""
    yield _head(found)
    yield from (f"  {line}" for line in _body(found, most))
    yield from (f"  {line}" for line in _parts(found, most))


def _parts(found: Explanation, most: int | None) -> Iterator[str]:
    """Of a module its results whole, and its collectives in a line each; of a long bucket the first member whole."""
    if found.kind in ("module", "stage"):
        whole, brief = [[p for p in found.parts if (p.kind == "collective") == is_sent] for is_sent in (False, True)]
        header: tuple[str, ...] = SENT
        rows = list(map(_row, brief))
    else:
        count = len(found.parts) if most is None or len(found.parts) <= 2 else 1
        whole, rows = list(found.parts[:count]), [_member_row(part) for part in found.parts[count:]]
        header = ("and likewise", "of", "for", "from")
    for part in whole:
        yield from explanation_lines(part, most)
    if rows:
        yield from table(header, rows).splitlines()


def _member_row(part: Explanation) -> tuple[object, ...]:
    """A member of a bucket in one line."""
    ends = [end.name if end else "" for end in (part.has, part.wants)]
    return part.name, *ends, "; ".join(part.ends)


def _row(part: Explanation) -> tuple[object, ...]:
    """A collective in one line; a member of a bucket is sent with others."""
    sent, of, ends = part.sent, part.has.name if part.has else "", "; ".join(part.ends)
    if sent is None:
        return part.name, "", "", "", of, ends, "; ".join(part.notes)
    return part.name, "+".join(sent.axes), sent.phase, sent.wire_bytes, of, ends, _seconds_text(sent.seconds)


def _head(found: Explanation) -> str:
    if found.sent:
        return f"{found.name}: {_sent_text(found.sent)}"
    what = f"{found.kind} {found.name}" + (f": {found.type}" if found.type else "")
    return what + _place(found.module, found.location)


def _sent_text(sent: Sent) -> str:
    of_stage = "" if sent.stage is None else f" of stage {sent.stage}"
    times = f", {sent.times} times a step" if sent.times > 1 else ""
    return (
        f"{sent.kind} over {', '.join(sent.axes)}, {sent.phase}{of_stage}, {sent.wire_bytes} B on the wire a rank"
        f"{times}, about {_seconds_text(sent.seconds)}"
    )


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _body(found: Explanation, most: int | None) -> Iterator[str]:
    ends = [(title, end) for title, end in (("has", found.has), ("wants", found.wants)) if end is not None]
    yield from _ends_text(ends)
    taken = {(reason.axis, reason.end) for reason in found.reasons if reason.kind == "taken"}
    for reason in found.reasons:
        if reason.kind == "cut" and (reason.axis, reason.end) in taken:
            continue  # said already
        yield f"because {reason_text(reason, found.wants)}"
    if found.placed and not any(chain.end == found.placed for chain in found.chains):
        yield f"annotated {found.placed}"
    for chain in _merged(found.chains):
        yield from _chain_text(chain, most)
    if found.ends == (REPLICATED,) and (found.type or found.parts):
        yield f"{REPLICATED}, since no annotation reaches it"
    yield from found.notes


def _ends_text(ends: Sequence[tuple[str, End]]) -> Iterator[str]:
    names = max((len(end.name) for _, end in ends), default=0)
    types = max((len(end.type) for _, end in ends), default=0)
    for title, end in ends:
        of = "" if end.operand is None else f"as operand {end.operand} of {end.op}"
        words = " ".join(filter(None, (of, _place(end.module, end.location).strip())))
        yield f"{title:5}  {end.name:{names}}  {end.type:{types}}  {words}".rstrip()


def reason_text(reason: Reason, user: End | None) -> str:
    """Why a value may not stay as it is, for its ``user``."""
    name, op = (user.name, user.op or user.name) if user else ("what reads it", "what reads it")
    return REASONS[reason.kind].format(axis=reason.axis, dim=reason.dim, end=reason.end, user=name, op=op)


def _merged(chains: Sequence[Chain]) -> Iterator[Chain]:
    """The chains, those of axes that came the same way as one."""
    ways: dict[object, list[Chain]] = {}
    for chain in chains:
        ways.setdefault((chain.end, chain.steps), []).append(chain)
    yield from (replace(found[0], axis=" and ".join(chain.axis for chain in found)) for found in ways.values())


def _chain_text(chain: Chain, most: int | None) -> Iterator[str]:
    yield f"{chain.axis} come{'' if ' and ' in chain.axis else 's'} from {chain.end}"
    steps, left_out = chain.steps, 0
    if most is not None and len(steps) > most:
        left_out = len(steps) - most
        steps = (*steps[: most // 3], *steps[len(steps) - most + most // 3 :])
    rows = [(step.value, step.type, _way(step)) for step in steps]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for i, (value, type_, way) in enumerate(rows):
        if left_out and i == (most or 0) // 3:
            yield f"  ... {left_out} more"
        yield f"  {value:{widths[0]}}  {type_:{widths[1]}}  {way}".rstrip()


def _way(step: Step) -> str:
    if step.role == "annotated":
        return ""
    if step.role == "tied":
        return f"since {step.via} lies so"
    op = step.via if step.call in ("", step.value) else _call(step)
    return f"{WORDS[step.role]} {op}{_place(step.module, step.location)}"


def _call(step: Step) -> str:
    """An op's name in the dump, which mostly says what it calls."""
    return step.call if step.call.startswith(step.via) else f"{step.call}, {step.via}"


def _place(module: str, location: str) -> str:
    words = ", ".join(filter(None, (module, location)))
    return f" ({words})" if words else ""
