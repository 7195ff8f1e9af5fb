"""What a model is and holds besides values: part of what a captured program depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from torch import Tensor, nn

from shardc.borrow import state_names
from shardc.frozen import frozen

State = tuple[tuple[str, Hashable], ...]

CONTAINERS = {dict, OrderedDict, list, set}  # empty they are left out, which saves most of the time
APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}


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


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Parameters and buffers by kind and name, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield ("parameter", name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield ("buffer", name), buffer
