"""All of a model that a captured program depends on, read before every call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.model import state_names, tensors_of
from shardc.capture.signature import State, fingerprint

ModelTensors = Mapping[tuple[str, str], Tensor]  # parameters and buffers, by kind and name
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), type)
CONTAINERS = {dict, OrderedDict, list, set}  # left out where empty, which saves most of the time
APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}


def _own_attributes(module: nn.Module) -> Mapping[str, Any]:
    """A module's attributes; ``forward`` is ``own`` of what stands for it in a parallel module."""
    attributes = vars(module)
    forward: Any = attributes.get("forward")
    return {**attributes, "forward": forward.own} if hasattr(forward, "own") else attributes


def model_state(model: nn.Module) -> State:
    """All of a model that forward may read besides values of tensors, by name.

    That is the shape and ``requires_grad`` of parameters, the names that are tied, and for every module its type and
    attributes, ``training`` and hooks included.
    """
    memo: dict[int, Hashable] = {}
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
    return tuple(state)


class LatestState:
    """The state and the tensors of a model, read again where a module changed since they were read last."""

    def __init__(self) -> None:
        self._modules: list[_ModuleBefore] = []
        self._state: State = ()
        self._tensors: ModelTensors = {}
        self.is_training = False  # whether a module is

    def read(self, model: nn.Module) -> tuple[State, ModelTensors]:
        """The model's state, the same object while nothing changes; its parameters and buffers by kind and name."""
        if not self.is_same():
            self._state, self._tensors = model_state(model), dict(tensors_of(model))
            self.is_training = any(module.training for module in model.modules())
            memo: dict[int, Hashable] = {}
            self._modules = [_ModuleBefore(module, memo) for module in model.modules()]
        return self._state, self._tensors

    def is_same(self) -> bool:
        """Whether the model that was read last is what it was then."""
        memo: dict[int, Hashable] = {}
        return bool(self._modules) and all(each.is_same(memo) for each in self._modules)


class _ModuleBefore:
    """What a module had when its state was read: by identity what never changes, by fingerprint what may."""

    def __init__(self, module: nn.Module, memo: dict[int, Hashable]) -> None:
        self._module, self._type, self._attributes = module, type(module), vars(module)
        self._names, self._values = list(self._attributes), list(self._attributes.values())
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules]
        self._tables = [(table, list(table), list(table.values())) for table in tables]
        self._tensors = [(x, x.requires_grad, x.shape) for table in tables[:2] for x in table.values() if x is not None]
        others = [value for name, value in _own_attributes(module).items() if name not in APART]
        containers = [value for value in others if type(value) in CONTAINERS]
        self._empty = [value for value in containers if not value]
        contents = [value for value in others if not isinstance(value, CONSTANTS)]
        self._contents = [(x, fingerprint(x, memo)) for x in contents if not (type(x) in CONTAINERS and not x)]

    def is_same(self, memo: dict[int, Hashable]) -> bool:
        """Whether a program cannot tell the module from what it was. ``memo``: fingerprints of this reading."""
        attributes = self._attributes
        return (
            type(self._module) is self._type
            and len(attributes) == len(self._values)
            and all(map(is_, attributes.values(), self._values))
            and list(attributes) == self._names
            and not any(self._empty)
            and all(
                list(table) == names and all(map(is_, table.values(), values)) for table, names, values in self._tables
            )
            and all(x.requires_grad is requires and x.shape == shape for x, requires, shape in self._tensors)
            and all(fingerprint(value, memo) == before for value, before in self._contents)
        )
