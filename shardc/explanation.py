"""What ``explain`` answers, as data: the way from annotations to a value, and why a collective is there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

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
        from shardc.explanation_text import explanation_lines

        return "\n".join(explanation_lines(self, most)) + "\n"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "parts": [part.record() for part in self.parts], "ends": self.ends}
