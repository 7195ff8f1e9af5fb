"""The state of a model: everything in it that a captured program depends on. It is read before every call."""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.model import state_names, tensors_of
from shardc.capture.signature import BY_IDENTITY, MAX_DEPTH, MAX_ENTRIES, Identity, State, entries_of, fingerprint

ModelTensors = Mapping[tuple[str, str], Tensor]  # parameters and buffers, by kind and name
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), type)
CONTAINERS = {dict, OrderedDict, list, set}  # left out where empty, which saves most of the time
SETTINGS = (bool, float, str, type(None))  # of classes
APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}


def _own_attributes(module: nn.Module) -> Mapping[str, Any]:
    """A module's attributes. ``forward`` is the module's own one, even if a parallel module has replaced it."""
    attributes = vars(module)
    forward: Any = attributes.get("forward")
    return {**attributes, "forward": forward.own} if hasattr(forward, "own") else attributes


def model_state(model: nn.Module, has_classes: bool = False) -> State:
    """Everything in a model that forward may read, except the values of tensors, by name.

    It is the shape of parameters and buffers, ``requires_grad`` of parameters, the names that are tied, and for every
    module its type and attributes, ``training`` and hooks included. ``has_classes`` adds those of its class.
    """
    memo = _identities(model)
    parameters, buffers, aliases = state_names(model)
    state: list[tuple[str, Hashable]] = [
        (f"requires_grad of {name}", parameter.requires_grad) for name, parameter in parameters.items()
    ]
    state += [(f"the shape of {name}", tuple(tensor.shape)) for name, tensor in {**parameters, **buffers}.items()]
    state += [(f"what {name} is tied to", first) for name, first in aliases.items()]
    paths: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if (first := paths.setdefault(id(module), path)) != path:
            state.append((f"module {path!r}", first))
            continue
        attributes = tuple(
            (name, fingerprint(value, memo))
            for name, value in _own_attributes(module).items()
            if value is not None and name not in APART and not (type(value) in CONTAINERS and not value)
        )
        state.append((f"module {path!r}", (type(module), attributes)))
    for kind in _classes(model) if has_classes else ():
        attributes = tuple((name, fingerprint(value, memo)) for name, value in _class_attributes(kind).items())
        state.append((f"class {kind.__qualname__!r}", (kind, attributes)))
    return tuple(state)


def _identities(model: nn.Module) -> dict[int, Hashable]:
    """Fingerprints of the model's modules, which are read one by one: an attribute that holds one is its identity."""
    return {id(module): Identity(module) for module in model.modules()}


def _classes(model: nn.Module) -> Iterator[type]:
    """The classes of the modules and those that they inherit from, without torch's own."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    every = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))
    return (kind for kind in every if kind is not object and not kind.__module__.startswith("torch."))


def _class_attributes(kind: type) -> dict[str, Any]:
    """The methods, flags, floating-point numbers and strings of a class.

    Whole numbers and containers are left out: they count instances and calls, or are caches.
    """
    attributes = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
    return {name: value for name, value in attributes if isinstance(value, SETTINGS) or hasattr(type(value), "__get__")}


class LatestState:
    """The state and the tensors of a model, read again if a module has changed since the last reading.

    ``has_classes``: whether attributes of the modules' classes count.
    """

    def __init__(self, has_classes: bool = False) -> None:
        self.has_classes = has_classes
        self._snapshot: _Snapshot | None = None
        self._state: State = ()
        self._tensors: ModelTensors = {}
        self.is_training = False  # whether any module is

    def read(self, model: nn.Module) -> tuple[State, ModelTensors]:
        """The model's state, the same object while nothing changes; its parameters and buffers by kind and name."""
        if not self.is_same():
            self._state, self._tensors = model_state(model, self.has_classes), dict(tensors_of(model))
            self.is_training = any(module.training for module in model.modules())
            self._snapshot = _Snapshot(model, self.has_classes)
        return self._state, self._tensors

    def is_same(self) -> bool:
        """Whether a program cannot tell the model from its state at the last reading."""
        return self._snapshot is not None and self._snapshot.is_same()


class _Snapshot:
    """Everything that ``model_state`` depends on. Comparing it by identity takes a tenth of the time of reading it."""

    def __init__(self, model: nn.Module, has_classes: bool) -> None:
        modules = list(model.modules())
        self._types = [(module, type(module)) for module in modules]
        self._tables = _Tables()
        for module in modules:
            for table in (vars(module), module._parameters, module._buffers, module._modules):
                self._tables.add(table)
        classes = list(_classes(model)) if has_classes else []
        for kind in classes:
            self._tables.add(vars(kind))
        tensors = chain.from_iterable((*module._parameters.values(), *module._buffers.values()) for module in modules)
        self._tensors = [(x, x.requires_grad, x.shape) for x in tensors if x is not None]
        attributes = chain.from_iterable(_own_attributes(module).items() for module in modules)
        others = {id(x): x for name, x in attributes if name not in APART and not isinstance(x, CONSTANTS)}
        self._empty = [x for x in others.values() if type(x) in CONTAINERS and not x]
        known = _identities(model)
        full = (x for x in others.values() if not (type(x) in CONTAINERS and not x))
        contents = (_Contents(x, known) for x in full if id(x) not in known)
        self._contents = [each for each in contents if each.may_change]

    def is_same(self) -> bool:
        """Whether the model is unchanged, or a program cannot tell the objects that it holds from those before."""
        return (
            self._tables.are_same()
            and all(type(module) is kind for module, kind in self._types)
            and not any(self._empty)
            and all(x.requires_grad is requires and x.shape == shape for x, requires, shape in self._tensors)
            and all(each.is_same() for each in self._contents)
        )


class _Tables:
    """Dicts and lists, each with a copy of its entries."""

    def __init__(self) -> None:
        self._dicts: list[tuple[Mapping[Any, Any], list[Any], list[Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._dicts or self._lists)

    def add(self, table: Mapping[Any, Any] | list[Any]) -> None:
        """Add a dict or a list, with a copy of its entries."""
        if isinstance(table, list):
            self._lists.append((table, list(table)))
        else:
            self._dicts.append((table, list(table), list(table.values())))

    def are_same(self) -> bool:
        """Whether all tables still have the same entries, by identity and in the same order."""
        for table, keys, values in self._dicts:
            if len(table) != len(values) or not all(map(is_, table.values(), values)) or list(table) != keys:
                return False
        return all(len(table) == len(values) and all(map(is_, table, values)) for table, values in self._lists)


class _Contents:
    """The value of an attribute with everything in it that may be changed in place.

    ``_modules``: the fingerprints of the model's modules, which are compared apart. ``_tables``: the dicts, lists and
    plain objects in it; ``_leaves``: other values whose fingerprint may change, each with its fingerprint.
    """

    def __init__(self, value: Any, modules: dict[int, Hashable]) -> None:
        self._value, self._modules = value, modules
        self._fingerprint = self._current()
        self._tables, self._leaves = _Tables(), list[tuple[Any, Hashable]]()
        self._add(value, set(), 0)

    @property
    def may_change(self) -> bool:
        """Whether anything in it may be changed in place."""
        return bool(self._tables or self._leaves)

    def _current(self) -> Hashable:
        return fingerprint(self._value, ChainMap({}, self._modules))

    def _add(self, value: Any, seen: set[int], depth: int) -> None:
        if isinstance(value, (*CONSTANTS, *BY_IDENTITY)) or id(value) in seen or id(value) in self._modules:
            return
        seen.add(id(value))
        entries = entries_of(value)
        if entries is None or len(entries) > MAX_ENTRIES:
            self._leaves.append((value, fingerprint(value)))
        elif depth < MAX_DEPTH:
            if not isinstance(entries, tuple):
                self._tables.add(entries)
            for each in entries.values() if isinstance(entries, dict) else entries:
                self._add(each, seen, depth + 1)

    def is_same(self) -> bool:
        """Whether the value still has the same contents, by identity; if not, whether its fingerprint is the same."""
        is_same = self._tables.are_same() and all(fingerprint(x) == before for x, before in self._leaves)
        return is_same or self._current() == self._fingerprint
