"""What is known of a program's nodes and ends: types, where a node comes from, why it is cut, what goes in and out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx.node import map_aggregate

from shardc.like_call import LikeCall, is_of_torch
from shardc.node import takes_device
from shardc.sharding import TensorType

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
