"""The cache key of a captured program: the signature of a call, with fingerprints of its arguments."""

from __future__ import annotations

import logging
import sys
from array import array
from collections import deque
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardc.language.sharding import TensorType
from shardc.language.size import number_of


@dataclass(frozen=True, slots=True)
class Signature:
    """All that a captured program depends on: two calls with equal signatures share a program.

    ``leaves``: every leaf of the arguments by name. ``state``: that of the model. It is often the same object, so it is
    quick to compare; it is slow to hash. ``autocast``: the dtype that autocast casts to, by device type.
    """

    leaves: Leaves
    tree: Hashable
    train: bool
    state: State = field(hash=False)
    default_dtype: torch.dtype = torch.float32
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    def without_sizes(self) -> Signature:
        """This signature with -1 for every size of a tensor."""

        def without(leaf: Leaf) -> Leaf:
            if not isinstance(leaf, TensorLeaf):
                return leaf
            return replace(leaf, type=TensorType((-1,) * len(leaf.type.shape), leaf.type.dtype))

        return replace(self, leaves=tuple((name, without(leaf)) for name, leaf in self.leaves))

    def differences(self, other: Signature) -> list[str]:
        """The differences between two signatures of a model, in words."""
        one, two = dict(self.leaves), dict(other.leaves)
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        texts = [f"input {name!r} ({one.get(name, 'not given')}, {two.get(name, 'not given')})" for name in names]
        state, other_state = dict(self.state), dict(other.state)
        names = [name for name in {**state, **other_state} if state.get(name) != other_state.get(name)]
        texts += [_changed(name, state.get(name), other_state.get(name)) for name in names]
        return texts or ["gradients on or off, the default dtype, or autocast"]


def _changed(name: str, one: Hashable, other: Hashable) -> str:
    """The name of an entry of a state; for that of a module or a class, with the attributes that differ."""
    match one, other:
        case (kind, tuple(before)), (other_kind, tuple(after)) if kind is other_kind:
            mine, theirs = dict(before), dict(after)
            changed = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            return f"{', '.join(changed[:4])} of {'the model' if name == THE_MODEL else name}"
    return name


THE_MODEL = "module ''"  # the name of its own entry


def changing_sizes(signatures: Sequence[Signature]) -> list[str]:
    """The dims of inputs that have more distinct sizes than half the number of a model's signatures, in words."""
    types: dict[str, list[TensorType]] = {}
    for signature in signatures:
        for name, leaf in signature.leaves:
            if isinstance(leaf, TensorLeaf):
                types.setdefault(name, []).append(leaf.type)
    texts: list[str] = []
    for name, of_input in types.items():
        for dim in range(min(len(each.shape) for each in of_input)):
            count = len({each.shape[dim] for each in of_input})
            if count > len(signatures) / 2:
                texts.append(f"dim {dim} of {name!r} had {count} sizes")
    return texts


def symbols_of(signatures: Sequence[Signature]) -> dict[tuple[str, int], str]:
    """A symbol for each dim of an input whose size differs between signatures, by the input's name and the dim.

    Dims that have had the same sizes share a symbol. A dim of size 0 or 1 in the last signature has none.
    """
    types = [{name: leaf.type for name, leaf in each.leaves if isinstance(leaf, TensorLeaf)} for each in signatures]
    symbols, names = dict[tuple[str, int], str](), dict[tuple[int, ...], str]()
    for name, last in types[-1].items():
        for dim, size in enumerate(last.shape):
            sizes = tuple(each[name].shape[dim] for each in types)
            if len(set(sizes)) > 1 and size > 1:
                symbols[name, dim] = names.setdefault(sizes, f"s{len(names)}")
    return symbols


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor among the leaves of a call or of an output."""

    type: TensorType
    requires_grad: bool = False

    def __str__(self) -> str:
        return str(self.type)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A leaf that is no tensor; equal to another whose value had the same fingerprint when it was created."""

    value: Any
    state: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", fingerprint(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    def __str__(self) -> str:
        return repr(self.value)


Leaf = TensorLeaf | Constant
Leaves = tuple[tuple[str, Leaf], ...]


def leaf_of(value: Any) -> Leaf:
    """The description of a leaf."""
    if isinstance(value, torch.Tensor):
        return TensorLeaf(TensorType.of(value), value.requires_grad)
    return Constant(number_of(value))


def signature_of(leaves: Sequence[tuple[str, Any]], tree: Hashable, train: bool, state: State) -> Signature:
    """The signature of a call with these leaves, on a model of this state."""
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    described = tuple((name, leaf_of(value)) for name, value in leaves)
    return Signature(described, tree, train, state, torch.get_default_dtype(), tuple(autocast))


State = tuple[tuple[str, Hashable], ...]

MAX_DEPTH, MAX_ENTRIES = 10, 10_000
LOGGING = (logging.Logger, logging.Handler, logging.Manager)
BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType, *LOGGING)
READ_VALUES = WeakIdKeyDictionary()  # tensors whose values were read during a capture, each with its version then
READ_OTHERWISE = (torch.Tensor, bytearray, array, Mapping, deque, set, frozenset, partial, MethodType)


class Identity:
    """The identity of an object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def fingerprint(value: Any, memo: MutableMapping[int, Hashable] | None = None, depth: int = 0) -> Hashable:
    """A hashable value that is equal for two objects which a model cannot tell apart.

    It is the type and value of a number or string; the contents of a container, array, module or plain object; the
    identity of a function, and of everything too large or too deep. For a tensor it is the identity and the shape; for
    one whose values a program may hold, also its number or version. ``memo``: the fingerprints of objects so far, by
    their id.
    """
    if isinstance(value, float):
        return float, repr(value)  # a nan is itself, -0.0 is not 0.0
    if value is None or isinstance(value, (bool, int, str, bytes, complex, torch.dtype, torch.device)):
        return type(value), value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = Identity(value)  # for a value that contains itself
        memo[id(value)] = _contents_fingerprint(value, memo, depth)
    return memo[id(value)]


def _contents_fingerprint(value: Any, memo: MutableMapping[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, torch.Tensor):
        return Identity(value), tuple(value.shape), _values_fingerprint(value)
    if isinstance(value, (bytearray, array)):
        return type(value), bytes(value)
    if _is_numpy(value):
        return type(value), value.shape, str(value.dtype), value.tobytes()
    is_large = isinstance(value, (Mapping, list, tuple, deque, set, frozenset)) and len(value) > MAX_ENTRIES
    contents = None if is_large or depth >= MAX_DEPTH else _contents(value)
    if contents is not None and len(contents) <= MAX_ENTRIES:
        return type(value), tuple((key, fingerprint(entry, memo, depth + 1)) for key, entry in contents.items())
    return (type(value), value) if _is_value(value) else Identity(value)


def _values_fingerprint(x: torch.Tensor) -> Hashable:
    """The number of a 0-dim tensor on the host; else how often a tensor was written since a capture read its values."""
    if x.ndim == 0 and x.device.type == "cpu" and type(x) in (torch.Tensor, torch.nn.Parameter):
        try:
            return fingerprint(x.item())
        except RuntimeError:  # of a dtype without numbers, or inside of a transform of torch
            pass
    if x.is_inference():
        return 0
    return x._version if x.ndim == 0 else x._version - READ_VALUES.get(x, x._version)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _contents(value: Any) -> Mapping[Hashable, Any] | None:
    """The contents of a container or a plain object; None for a value that shows none."""
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
    if isinstance(value, BY_IDENTITY):
        return None
    if attributes := getattr(value, "__dict__", None):
        return attributes
    return None if _is_value(value) else attributes_of(value) or None  # one without attributes may hide what it holds


def entries_of(value: Any) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
    """The dict, list, tuple or attributes that ``fingerprint`` reads of a value; None if it reads anything else."""
    if isinstance(value, (dict, list, tuple)):
        return value
    is_plain = not isinstance(value, (*READ_OTHERWISE, *BY_IDENTITY)) and not _is_numpy(value)
    return getattr(value, "__dict__", None) or None if is_plain else None


def attributes_of(value: Any) -> dict[Any, Any]:
    """The attributes of a plain object, those in ``__slots__`` too."""
    state = object.__getstate__(value)
    if isinstance(state, tuple):
        return {**(state[0] or {}), **state[1]}
    return dict(state) if isinstance(state, dict) else {}


def _is_value(value: Any) -> bool:
    """Whether a value is hashable and defines its own equality."""
    try:
        hash(value)
    except TypeError:
        return False
    return "__eq__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
