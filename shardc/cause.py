"""Why something is sent: what the producer of a value had, and what who takes it wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardc.fact import Origin
    from shardc.sharding import Sharding, TensorType

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
class Place:
    """A node, or an end of the program such as ``the gradient w``, and where it is in the user's model."""

    name: str
    module: str = ""
    location: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.module})" if self.module else self.name


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
class Stored:
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
class Moved:
    """A value is wanted otherwise than it was made.

    ``type`` is global. ``operand``: which one of ``user`` it is, if that is an op. ``came``: for each axis of ``has``,
    why. ``needs``: for each axis that changes, why. ``stored``: of a gradient that lies as its parameter is stored.
    ``added``: of a sum of several values that would each have been moved so, why the others would have been.
    """

    value: Place
    type: TensorType
    has: Sharding
    user: Place
    wants: Sharding
    operand: int | None = None
    came: Mapping[str, Origin] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    stored: Stored | None = None
    added: tuple[Cause, ...] = ()

    @property
    def text(self) -> str:
        """In a few words."""
        return f"{self.value} is {self.has.text(self.type)}, {self.user} wants {self.wants.text(self.type)}"


@dataclass(frozen=True, slots=True)
class Edges:
    """An op reads, of a value, the edges of neighbours' chunks."""

    value: Place
    type: TensorType
    has: Sharding
    user: Place
    came: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In a few words."""
        return f"{self.value} is {self.has.text(self.type)}, {self.user} reach into neighbours' chunks"


@dataclass(frozen=True, slots=True)
class Crossed:
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


Cause = Moved | Edges | Stored | Crossed


def cause_text(causes: Sequence[Cause], most: int | None = None) -> str:
    """Why each is there, and once each annotation that they come from; of more than ``most`` the first alone."""
    said = [text for cause in causes for text in _said(cause)]
    if most is not None and len(said) > most:
        said = [said[0], f"and {len(said) - 1} more"]
    came = dict.fromkeys(f"{axis} from {origin.annotation}" for each in causes for axis, origin in each.came.items())
    return "; ".join([*said, *came])


def _said(cause: Cause) -> Iterator[str]:
    yield cause.text
    if isinstance(cause, Moved) and cause.stored:
        yield cause.stored.text
