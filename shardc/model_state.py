"""What a model is and holds besides values, looked at before every call, and described anew where something changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from shardc.borrow import state_names
from shardc.frozen import frozen

State = tuple[tuple[str, Hashable], ...]

CONTAINERS = {dict, OrderedDict, list, set}  # empty they are left out, which saves most of the time
APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
MAX_STATES = 32  # that may come again, as of train() and eval()
HELD = ("_parameters", "_buffers", "_modules")
SETTLED = (  # the same object says the same
    bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device,
    FunctionType, BuiltinFunctionType, ModuleType, nn.Module,
)  # fmt: skip


def model_state(model: nn.Module) -> State:
    """The ``requires_grad`` of every parameter, what every module is and holds besides tensors, by name, and its sizes.

    ``training`` and hooks are among it: forward may read all. Of what has several names, which of them are one.
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
        first = paths.setdefault(id(module), path)
        state.append((f"module {path!r}", _module_state(module, memo) if first == path else first))
    return tuple(state)


def _module_state(module: nn.Module, memo: dict[int, Hashable]) -> Hashable:
    return type(module), tuple(
        (name, frozen(value, memo))
        for name, value in vars(module).items()
        if value is not None and name not in APART and not (type(value) in CONTAINERS and not value)
    )


class Watched:
    """A model whose state and tensors are asked for again and again.

    State: ``state`` and ``tensors`` (parameters and buffers by kind and name, tied ones under each of their names), as
    found at the last look; and what shows that they still hold: the dicts of all modules, with the keys and the objects
    that were in them, which containers were empty, and what all else that may change in place was described as.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[State, State] = {}
        self._look()

    def read(self) -> tuple[State, Mapping[tuple[str, str], Tensor]]:
        """The state, one object as long as it stays the same, and the tensors."""
        if self._is_changed():
            self._look()
        return self.state, self.tensors

    def _is_changed(self) -> bool:
        return (
            list(map(dict_version, self._dicts)) != self._versions
            or [type(module) for module in self._modules] != self._types
            or any(self._empty)
            or [parameter.requires_grad for parameter in self._parameters] != self._wanting
            or self._describe() != self._described
        )

    def _look(self) -> None:
        model = self._model
        state = model_state(model)
        if len(self._known) > MAX_STATES:
            self._known.clear()
        self.state = self._known.setdefault(state, state)
        self.tensors = dict(tensors_of(model))
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._types = [type(module) for module in self._modules]
        self._wanting = [parameter.requires_grad for parameter in self._parameters]
        self._dicts = [
            held for module in self._modules for held in (vars(module), *(vars(module)[name] for name in HELD))
        ]
        self._versions = list(map(dict_version, self._dicts))
        others = [value for module in self._modules for name, value in vars(module).items() if name not in APART]
        others = [value for value in others if not _is_settled(value)]
        self._empty = [value for value in others if type(value) in CONTAINERS and not value]
        self._mutable = [value for value in others if not (type(value) in CONTAINERS and not value)]
        self._described = self._describe()

    def _describe(self) -> list[Hashable]:
        memo: dict[int, Hashable] = {}
        return [frozen(value, memo) for value in self._mutable]


def _is_settled(value: Any) -> bool:
    return isinstance(value, SETTLED) or (type(value) is tuple and all(map(_is_settled, value)))


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Parameters and buffers by kind and name, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield ("parameter", name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield ("buffer", name), buffer
