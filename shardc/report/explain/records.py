"""The answer of ``explain`` as records. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardc.language.machine import SentKind
from shardc.language.record import Amount, Count, Size
from shardc.program.provenance import NeedKind, Phase

Subject = Literal[
    "parameter", "buffer", "input", "value", "output", "gradient", "module", "stage", "annotation", "collective"
]
Role = Literal["annotated", "made", "summed", "passed", "read", "wanted", "tied", "moved", "repeated"]
ReasonKind = Literal[NeedKind, "crossed", "stored", "edges", "stages"]
Aim = Literal["to remove it", "to send less between stages"]


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

    ``seconds``: predicted, on the machine that was compiled for. ``stage``: of a pipeline, which runs it.
    """

    kind: SentKind
    axes: tuple[str, ...]
    phase: Phase
    bytes: Count
    wire_bytes: Count
    seconds: Amount
    stage: int | None
    times: Size


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
class ExplanationEntry:
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
    type: str
    module: str
    location: str
    chains: tuple[Chain, ...]
    placed: str
    sent: Transmission | None
    has: Side | None
    wants: Side | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    parts: tuple[ExplanationEntry, ...]
    ends: tuple[str, ...]


# What a command writes.


@dataclass(frozen=True, slots=True)
class AlternativeEntry:
    """One of several ways to do the same.

    ``question``: what is to be done. ``wire_bytes``: of one rank. ``note``: what else it costs.
    """

    question: str
    way: str
    wire_bytes: Count
    is_chosen: bool
    note: str


@dataclass(frozen=True, slots=True)
class FiguresEntry:
    """What a step costs one rank. ``crossing``: bytes that cross between stages."""

    wire_bytes: Count
    peak: Count
    optimizer: Count
    flops: Count
    num_collectives: Count
    crossing: Count


@dataclass(frozen=True, slots=True)
class SuggestionEntry:
    """A change that removes a collective, and what a step costs a rank before and after.

    ``change``: in words. ``is_free``: whether less is sent, and nothing else grows. ``python``: as one types it.
    ``flags``: as one adds it to the command line. ``all_flags``: as one types it where --annotate stands in place of
    the target's own annotations. ``instead``: the kinds of collectives that then move the same values.
    """

    change: str
    before: FiguresEntry
    after: FiguresEntry
    is_free: bool
    python: str
    flags: str
    all_flags: str
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdviceEntry:
    """What would remove a collective, or let less cross between stages.

    ``tried``: how many changes were compiled. ``why``: what it is there for, in any plan like this one.
    ``suggestion``: null where no change was found. ``blocks``: the repeated blocks of the model that stood for all of
    them where changes were tried; empty for the whole model.
    """

    name: str
    tried: Count
    why: str
    suggestion: SuggestionEntry | None
    aim: Aim
    blocks: str


@dataclass(frozen=True)
class Versioned:
    """The version of a form."""

    version: Literal[1] = field(default=1, init=False)


@dataclass(frozen=True)
class Explained(ExplanationEntry, Versioned):
    """Why something of a program is as it is."""


@dataclass(frozen=True)
class ExplainedCollective(Explained):
    """Why a collective is there.

    ``alternatives``: what the compiler chose among. ``advice``: null where none was asked for.
    """

    alternatives: tuple[AlternativeEntry, ...]
    advice: AdviceEntry | None
