"""Why something is sent: what the producer of a value had, and what who takes it wants."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx.node import map_aggregate

from shardc.language.sharding import Sharding, TensorType
from shardc.program.inference import LikeCall, is_of_torch
from shardc.program.node import takes_device

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


Phase = Literal["forward", "backward", "update"]
Types = TensorType | tuple[TensorType | None, ...] | None


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


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder, in order. ``name``: the parameter's or buffer's path, or the input's (``x``, ``batch.ids``).

    ``tangent``: the gradient of the output that it names. ``random``: int64[2], seed and step.
    """

    name: str
    kind: Literal["parameter", "buffer", "input", "tangent", "random"]
    type: TensorType
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An element of the output node's one tuple argument, in order.

    ``gradient``: of the parameter or input that it names. ``buffer``: a buffer's new value, written back after the
    step. ``computed``: a parameter as it is computed on, where that is kept until the parameter is written. ``guard``:
    what keeps an op in the program that must find in values what it found at capture.
    """

    name: str
    kind: Literal["output", "gradient", "buffer", "computed", "guard"]


def types_made(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> Types:
    """What a call returns that has types for tensors: run on meta tensors; the few ops that cannot be, on zeros.

    Torch's own ops go by nothing else, so that one that is called alike, as in every layer, runs once.
    """
    if not is_of_torch(target):
        return _types_of_run(target, args, kwargs, device)
    return _types_of_call(LikeCall.of(target, args, kwargs, device))


@functools.lru_cache(maxsize=4096)
def _types_of_call(call: LikeCall) -> Types:
    return _types_of_run(call.target, call.args, call.kwargs, call.device)


def _types_of_run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Types:
    def tensor(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, TensorType) else leaf

    placed = {**kwargs, "device": device} if takes_device(target) else dict(kwargs)
    try:
        return types_of(target(*map_aggregate(args, tensor), **map_aggregate(placed, tensor)))
    except NotImplementedError:
        if device == "cpu":
            raise
        return _types_of_run(target, args, kwargs, "cpu")


def types_of(value: Any) -> Types:
    """The type of what an op returned: of a tensor, or of each tensor of a tuple or list with None for what is none."""
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(map(int, value.shape)), value.dtype)
    if isinstance(value, (list, tuple)):
        types = (types_of(entry) for entry in value)
        return tuple(entry if isinstance(entry, TensorType) else None for entry in types)
    return None


PARAMETER_FIRST, DATA, PARAMETER, YIELDING = -1, 0, 1, 2  # who speaks first about an axis: passes/pins.py says why


@dataclass(frozen=True, slots=True)
class Pin:
    """A value whose sharding the user fixed.

    ``name``: of an input, or of a node when ``kind`` is ``value``. ``open``: dims left to propagation. ``text``: the
    annotation as the user wrote it. ``kind`` decides who yields on conflict: inputs and values come before parameters.
    ``is_asked``: an output that is to come back whole, and is computed as it comes. ``stages``: of a pipeline, those
    that hold a parameter already.
    """

    name: str
    kind: str
    sharding: Sharding
    open: frozenset[int]
    text: str
    priority: int = 0
    is_asked: bool = False
    stages: frozenset[int] = frozenset()

    @property
    def is_said(self) -> bool:
        """Whether an annotation says it, and not a parameter that lies so already, nor a pipeline."""
        return ": P(" in self.text
