"""Provenance: the source of each node, the origin of each cut, the causes of communication, the choices of passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shardc.language.mesh import Mesh
from shardc.language.rule import Rule
from shardc.language.sharding import DimSharding, Sharding, TensorType
from shardc.options.saved import tier_text

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Source:
    """The place in the user's model that a node comes from: module path, ``file.py:line``, phase.

    ``marks``: the number of ``stage_boundary`` calls before it. ``ordinal``: the number of the op of forward that the
    node is, or for which it was made; -1 if there is none. ``stage``: the pipeline stage of that op.
    """

    module: str = ""
    location: str = ""
    phase: Phase = "forward"
    marks: int = 0
    ordinal: int = field(default=-1, compare=False)
    stage: int = field(default=0, compare=False)

    @property
    def place(self) -> str:
        """The line and the module, for errors."""
        line = self.location or "a line that is not known"
        return f"{line} in {self.module}" if self.module else line


PARAMETER_FIRST, DATA, PARAMETER, YIELDING = -1, 0, 1, 2  # precedence of annotations: passes/propagate/propagate.py


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an axis cuts a value: its annotation, and the last op on the way from there, linked to the previous origin.

    ``rank`` is the precedence of the annotation (``DATA``, ``PARAMETER``, ...): on conflict the lower one wins.
    ``value``: the value that the axis cuts here, as the name of a node and the index of a result. ``via``: the op's
    node, or the owner of a value that follows its sharding, such as ``the gradient w``. ``addends``: for a sum of
    several partial sums, the origins of the others.
    """

    annotation: str
    rank: int
    value: tuple[str, int]
    via: str = ""
    previous: Origin | None = None
    addends: tuple[Origin, ...] = field(default=(), repr=False)

    def through(self, via: str, value: tuple[str, int]) -> Origin:
        """The origin of the axis on another value, which it reached through an op."""
        return Origin(self.annotation, self.rank, value, via, self)

    @property
    def chain(self) -> tuple[Origin, ...]:
        """The origins on the way of the axis, from the annotated value to this one."""
        chain, here = [self], self.previous
        while here is not None:
            chain.append(here)
            here = here.previous
        return tuple(reversed(chain))

    @property
    def further_annotations(self) -> tuple[Origin, ...]:
        """For each further annotation whose partial sums were added on the way, one origin."""
        by_annotation: dict[str, Origin] = {}
        for here in self.chain:
            for addend in here.addends:
                for origin in (addend, *addend.further_annotations):
                    by_annotation.setdefault(origin.annotation, origin)
        return tuple(origin for origin in by_annotation.values() if origin.annotation != self.annotation)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The producer or the consumer of a value: a node, or an end of the program such as ``the gradient w``."""

    name: str
    module: str = ""
    location: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.module})" if self.module else self.name


NeedKind = Literal["sum", "readers", "whole", "fallback", "taken", "unfit", "fewest", "placed", "end", "cut"]
"""Why a sharding must change over an axis:

- ``sum``: the consumer needs the complete sum; ``readers``: several consumers do, and it is reduced once for all
- ``whole``: the op needs the dim whole; ``fallback``: the op has no rule and runs whole
- ``taken``: the axis cuts another dim of the op; ``unfit``: the op cannot be computed on such pieces
- ``fewest``: of the ways to compute the op this one moves the fewest bytes
- ``placed``: the consumer is annotated; ``end``: a gradient, buffer or output has the sharding of its owner
- ``cut``: the axis cuts the new sharding and not the old one
"""


@dataclass(frozen=True, slots=True)
class Need:
    """Why the sharding of a value must change over ``axis``, which cuts or will cut its dim ``dim``.

    ``origin``: the annotation that requires it, by the axis that comes from it. ``stated``: the text of an annotation
    that requires it, where no axis comes from it.
    """

    axis: str
    kind: NeedKind
    dim: int | None = None
    origin: Origin | None = None
    stated: str = ""

    @property
    def annotation(self) -> str:
        """The annotation that requires the change; empty if there is none."""
        return self.origin.annotation if self.origin else self.stated


@dataclass(frozen=True, slots=True)
class StorageChange:
    """A parameter is stored in another sharding than it is computed on, by the option ``option``."""

    name: str
    type: TensorType
    stored: Sharding
    computed: Sharding
    option: str
    origins: ClassVar[Mapping[str, Origin]] = {}  # no axis comes from an annotation

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the parameter between uses alone, in their order."""
        computed = {part.name for part in self.computed.cut_axes}
        return tuple(dict.fromkeys(part.name for part in self.stored.cut_axes if part.name not in computed))

    @property
    def text(self) -> str:
        """The change in a few words."""
        stored, computed = self.stored.text(self.type), self.computed.text(self.type)
        return f"{self.name} is stored as {stored} by zero, and computed on as {computed}"


@dataclass(frozen=True, slots=True)
class SavedCut(StorageChange):
    """A value of forward is saved for backward in another sharding than it has, or elsewhere, by the option ``option``.

    ``to``: the tier below in which it is saved; None on the device.
    """

    to: str | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that a rank saves."""
        return TensorType(self.stored.local_shape(self.type.shape), self.type.dtype).nbytes

    @property
    def text(self) -> str:
        """The change in a few words."""
        stored, computed = self.stored.text(self.type), self.computed.text(self.type)
        where = "" if self.to is None else f" in {tier_text(self.to)}"
        return f"{self.name} is saved as {stored}{where}, and read in backward as {computed}"


@dataclass(frozen=True, slots=True)
class ShardingChange:
    """A consumer needs a value in the sharding ``dst``; its producer has it in ``src``.

    ``type`` is global. ``operand``: the index among the operands of ``user``, if that is an op. ``origins``: why each
    axis cuts ``src``. ``needs``: why each axis changes. ``stored``: for a gradient, how its parameter is stored.
    ``added``: for a sum of several values, the changes that the others would have needed.
    """

    value: Endpoint
    type: TensorType
    src: Sharding
    user: Endpoint
    dst: Sharding
    operand: int | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    stored: StorageChange | None = None
    added: tuple[Cause, ...] = ()

    @property
    def text(self) -> str:
        """The change in a few words."""
        return f"{self.value} is {self.src.text(self.type)}, {self.user} wants {self.dst.text(self.type)}"


@dataclass(frozen=True, slots=True)
class NeighbourEdges:
    """An op reads the edges of neighbours' chunks of a value."""

    value: Endpoint
    type: TensorType
    src: Sharding
    user: Endpoint
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The exchange in a few words."""
        return f"{self.value} is {self.src.text(self.type)}, {self.user} reach into neighbours' chunks"


@dataclass(frozen=True, slots=True)
class RoundOfKeys(NeighbourEdges):
    """Queries of attention see keys of other chunks, which go round in ``steps``."""

    steps: int = 1

    @property
    def text(self) -> str:
        """The exchange in a few words."""
        return f"{self.value} is {self.src.text(self.type)}, {self.user} sees keys of other chunks, steps: {self.steps}"


@dataclass(frozen=True, slots=True)
class StageCrossing:
    """A stage of the pipeline ``option`` reads values of another stage. ``values``: the names of their nodes."""

    source: int
    target: int
    values: tuple[str, ...]
    option: str
    origins: ClassVar[Mapping[str, Origin]] = {}  # a message is sent in whatever sharding the value has

    @property
    def text(self) -> str:
        """The message in a few words."""
        return f"stage {self.target} reads what stage {self.source} makes"


Cause = ShardingChange | NeighbourEdges | StorageChange | StageCrossing


def cause_text(causes: Sequence[Cause], most: int | None = None) -> str:
    """The causes in a few words, then each annotation that they come from; of more than ``most`` causes the first."""
    texts: list[str] = []
    for cause in causes:
        texts.append(cause.text)
        if isinstance(cause, ShardingChange) and cause.stored:
            texts.append(cause.stored.text)
    if most is not None and len(texts) > most:
        texts = [texts[0], f"and {len(texts) - 1} more"]
    annotations = (f"{axis} from {origin.annotation}" for each in causes for axis, origin in each.origins.items())
    return "; ".join([*texts, *dict.fromkeys(annotations)])


# Choices of passes, with the alternatives. A pass records its choice; a reader prices it.

Shardings = tuple[Sharding | None, ...]
Cuts = dict[str, DimSharding]  # by factor


@dataclass(frozen=True, slots=True)
class OpTensors:
    """The operands and results of an op that is to be cut. The cost of any way to cut it follows from them.

    Types are global. ``arriving``: the sharding in which each operand arrives. ``propagated``: the shardings to which
    the results are brought. ``uniform``: the operands whose elements are all one number; nothing of them is sent.
    """

    mesh: Mesh
    rule: Rule
    operand_types: tuple[TensorType | None, ...]
    arriving: Shardings
    uniform: frozenset[int]
    result_types: tuple[TensorType | None, ...]
    propagated: Shardings


@dataclass(frozen=True, slots=True)
class CutChoice:
    """The cut of an op: ``operands`` and ``results`` are the shardings in which it takes and makes its ``tensors``.

    ``considered``: the cuts of its factors that were compared; empty if the user annotated the value.
    """

    tensors: OpTensors
    considered: tuple[Cuts, ...]
    operands: Shardings
    results: Shardings


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form of an op that needs a dim whole although ``axes`` cut it: taken apart (``is_apart``), or gathering it.

    ``op``: the name of its node, which is gone if the op was taken apart; ``target``: the name of the op.
    ``apart_bytes``, ``gathered_bytes``: the bytes that a rank sends by either form. ``refused``: why taking it apart
    was not considered. ``ways``: for an op with more than two ways, each in words with the bytes that a rank sends; the
    chosen one first.
    """

    op: str
    target: str
    source: Source
    axes: frozenset[str]
    apart_bytes: int
    gathered_bytes: int
    is_apart: bool = False
    refused: str = ""
    ways: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SideChoice:
    """Whether data or parameters move in an op that ``axis`` cuts in both.

    ``data_bytes``: the bytes that a rank sends in a step if all parameters come to the data; ``wire_bytes``: those of
    the choice that was made.
    """

    axis: str
    data_bytes: int
    wire_bytes: int
