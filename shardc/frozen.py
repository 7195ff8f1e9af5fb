"""What a Python value is now, as something hashable: a part of the key under which a captured program is kept."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Hashable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

MAX_DEPTH, MAX_ENTRIES = 6, 256
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType, nn.Module)


class Same:
    """Equal to another of the same object alone, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def frozen(value: Any, memo: dict[int, Hashable] | None = None, depth: int = 0) -> Hashable:
    """Equal for two values that a model cannot tell apart.

    Numbers and strings stand for themselves with their type, containers, arrays and plain objects for what they hold,
    functions, modules and whatever is too large or too deep for their identity. A tensor stands for its identity; one
    of 0 dims, whose number a program may hold, for its version too. ``memo``: what is known already, by identity.
    """
    if isinstance(value, float):
        return float, repr(value)  # a nan is itself, -0.0 is not 0.0
    if value is None or isinstance(value, (bool, int, str, bytes, complex, torch.dtype, torch.device)):
        return type(value), value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = Same(value)  # of a value that holds itself
        memo[id(value)] = _frozen(value, memo, depth)
    return memo[id(value)]


def _frozen(value: Any, memo: dict[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, torch.Tensor):
        return Same(value), value._version if value.ndim == 0 and not value.is_inference() else 0
    if isinstance(value, (bytearray, array)):
        return type(value), bytes(value)
    if _is_array(value):
        return type(value), value.shape, str(value.dtype), value.tobytes()
    held = _held(value)
    if held is not None and len(held) <= MAX_ENTRIES and depth < MAX_DEPTH:
        return type(value), tuple((key, frozen(entry, memo, depth + 1)) for key, entry in held.items())
    return (type(value), value) if _is_value(value) else Same(value)


def _held(value: Any) -> Mapping[Hashable, Any] | None:
    """What a container or a plain object holds; None for a value that holds nothing that can be seen."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(sorted(value, key=repr))
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"func": value.__func__, "self": value.__self__}
    if isinstance(value, _BY_IDENTITY):
        return None
    if attributes := getattr(value, "__dict__", None):
        return attributes
    return None if _is_value(value) else attributes_of(value) or None  # one without attributes may hide what it holds


def attributes_of(value: Any) -> dict[Any, Any]:
    """The attributes of a plain object, those in ``__slots__`` too."""
    state = object.__getstate__(value)
    if isinstance(state, tuple):
        return {**(state[0] or {}), **state[1]}
    return dict(state) if isinstance(state, dict) else {}


def _is_value(value: Any) -> bool:
    """Whether a value says itself what it is equal to."""
    try:
        hash(value)
    except TypeError:
        return False
    return "__eq__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
