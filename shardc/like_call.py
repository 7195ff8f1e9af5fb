"""Calls that are alike: what an op of torch makes goes by its arguments alone, so that of like ones one is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LikeCall:
    """A call of an op on a device, equal to one whose arguments are equal and of the same Python types."""

    target: Any
    args: tuple[Any, ...] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)
    device: str
    given: tuple[Any, ...]
    default: torch.dtype

    @staticmethod
    def of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> LikeCall:
        """The call, with what describes tensors in their place."""
        given = (_told_apart(args), _told_apart(dict(kwargs)))
        return LikeCall(target, args, kwargs, device, given, torch.get_default_dtype())


def is_of_torch(target: Any) -> bool:
    """Whether an op is one of torch's own, which nothing but a call's arguments changes."""
    return getattr(target, "namespace", "") in ("aten", "prims")


def _told_apart(argument: Any) -> Any:
    """An argument that can be hashed, of which 1, 1.0 and True are three."""
    if isinstance(argument, dict):
        return tuple((name, _told_apart(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(_told_apart, argument))
    return type(argument), argument
