"""Provenance: where a node comes from, why an axis cuts a value, and why something is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardc.language.sharding import Sharding, TensorType

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a node comes from in the user's model: module path, ``file.py:line``, phase.

    ``marks``: how many calls of ``stage_boundary`` lie before it. ``ordinal``: which call of forward it is, or was made
    for, in order; -1 where there is none. ``stage``: of a pipeline, where that call is.
    """

    module: str = ""
    location: str = ""
    phase: Phase = "forward"
    marks: int = 0
    ordinal: int = field(default=-1, compare=False)
    stage: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an axis cuts a value: the annotation it came from, and the last op it came through, linked to the one before.

    ``rank`` is 0 for an annotated input or value, 1 for a parameter, and others in pin.py; on conflict the lower wins.
    ``value``: the one that it cuts, as the name of its node and which of the node's results it is. ``via``: the op's
    node, or what must lie as that which it belongs to, such as ``the gradient w``. ``beside``: of a sum of several open
    sums, where those of the others came from.
    """

    annotation: str
    rank: int
    value: tuple[str, int]
    via: str = ""
    before: Origin | None = None
    beside: tuple[Origin, ...] = field(default=(), repr=False)

    def through(self, via: str, value: tuple[str, int]) -> Origin:
        """The origin of the axis on another value, which it came to through an op."""
        return Origin(self.annotation, self.rank, value, via, self)

    @property
    def chain(self) -> tuple[Origin, ...]:
        """The origin on each value that the axis came through: first on the one that is annotated, last on this."""
        found, here = [self], self.before
        while here is not None:
            found.append(here)
            here = here.before
        return tuple(reversed(found))

    @property
    def others(self) -> tuple[Origin, ...]:
        """Of the open sums that were added to this one on its way, one for each further annotation."""
        found: dict[str, Origin] = {}
        for here in self.chain:
            for other in here.beside:
                for each in (other, *other.others):
                    found.setdefault(each.annotation, each)
        return tuple(each for each in found.values() if each.annotation != self.annotation)


PARAMETER_FIRST, DATA, PARAMETER, YIELDING = -1, 0, 1, 2  # who speaks first about an axis: passes/pins.py says why


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A node, or an end of the program such as ``the gradient w``, and where it is in the user's model."""

    name: str
    module: str = ""
    location: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.module})" if self.module else self.name


NeedKind = Literal["sum", "readers", "whole", "fallback", "taken", "unfit", "fewest", "placed", "end", "cut"]
"""Why a value may not stay as it is, over an axis:

- ``sum``: who takes it needs the sum itself; ``readers``: several do, and it is reduced once for all
- ``whole``: the op needs the dim whole; ``fallback``: it has no rule and runs whole
- ``taken``: the axis cuts another dim of the op; ``unfit``: the op cannot be computed on pieces cut so
- ``fewest``: of the ways to compute the op this one moves the fewest bytes
- ``placed``: it is annotated so; ``end``: a gradient, a buffer or an output lies as what it belongs to
- ``cut``: the axis cuts what is wanted, where it did not cut what there is
"""


@dataclass(frozen=True, slots=True)
class Need:
    """Why a value may not stay as it is over ``axis``, in its dim ``dim`` where that is cut.

    ``by``: where it is an annotation's doing. ``said``: that annotation, where no axis comes from it.
    """

    axis: str
    kind: NeedKind
    dim: int | None = None
    by: Origin | None = None
    said: str = ""

    @property
    def end(self) -> str:
        """The annotation whose doing it is, if it is one's."""
        return self.by.annotation if self.by else self.said


@dataclass(frozen=True, slots=True)
class StorageChange:
    """A parameter lies otherwise between uses, by the option ``option``."""

    name: str
    type: TensorType
    stored: Sharding
    computed: Sharding
    option: str

    @property
    def text(self) -> str:
        """In a few words."""
        lies, is_computed = self.stored.text(self.type), self.computed.text(self.type)
        return f"{self.name} is stored as {lies} by zero, and computed on as {is_computed}"

    @property
    def came(self) -> Mapping[str, Origin]:
        """None of its axes come from annotations."""
        return {}


@dataclass(frozen=True, slots=True)
class ShardingChange:
    """A value is wanted otherwise than it was made.

    ``type`` is global. ``operand``: which one of ``user`` it is, if that is an op. ``came``: for each axis of ``has``,
    why. ``needs``: for each axis that changes, why. ``stored``: of a gradient that lies as its parameter is stored.
    ``added``: of a sum of several values that would each have been moved so, why the others would have been.
    """

    value: Endpoint
    type: TensorType
    has: Sharding
    user: Endpoint
    wants: Sharding
    operand: int | None = None
    came: Mapping[str, Origin] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    stored: StorageChange | None = None
    added: tuple[Cause, ...] = ()

    @property
    def text(self) -> str:
        """In a few words."""
        return f"{self.value} is {self.has.text(self.type)}, {self.user} wants {self.wants.text(self.type)}"


@dataclass(frozen=True, slots=True)
class NeighbourEdges:
    """An op reads, of a value, the edges of neighbours' chunks."""

    value: Endpoint
    type: TensorType
    has: Sharding
    user: Endpoint
    came: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In a few words."""
        return f"{self.value} is {self.has.text(self.type)}, {self.user} reach into neighbours' chunks"


@dataclass(frozen=True, slots=True)
class StageCrossing:
    """A stage of a pipeline, which ``option`` asks for, reads what another makes: nodes by name."""

    source: int
    target: int
    values: tuple[str, ...]
    option: str

    @property
    def text(self) -> str:
        """In a few words."""
        return f"stage {self.target} reads what stage {self.source} makes"

    @property
    def came(self) -> Mapping[str, Origin]:
        """What is sent crosses as it lies, however that is."""
        return {}


Cause = ShardingChange | NeighbourEdges | StorageChange | StageCrossing


def cause_text(causes: Sequence[Cause], most: int | None = None) -> str:
    """Why each is there, and once each annotation that they come from; of more than ``most`` the first alone."""
    said = [text for cause in causes for text in _said(cause)]
    if most is not None and len(said) > most:
        said = [said[0], f"and {len(said) - 1} more"]
    came = dict.fromkeys(f"{axis} from {origin.annotation}" for each in causes for axis, origin in each.came.items())
    return "; ".join([*said, *came])


def _said(cause: Cause) -> Iterator[str]:
    yield cause.text
    if isinstance(cause, ShardingChange) and cause.stored:
        yield cause.stored.text
