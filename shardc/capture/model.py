"""The user's model while it is captured: other tensors in place of its own, hooks on it, and all put back after."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

_MEMOIZED = functools._lru_cache_wrapper


_EMPTY_CELL = CellType()


@contextmanager
def borrow(model: nn.Module, train: bool) -> Iterator[None]:
    """Whatever the block does to the modules' attributes, tensors, hooks, lists and caches is undone at its end.

    What their code memoized in the block by ``functools.cache`` is forgotten, for it may hold tensors of the block.
    With ``train`` a transformers model leaves its key-value cache away: ``config.use_cache`` is off in the block.
    """
    modules = list(model.modules())
    attributes = [(module, dict(vars(module))) for module in modules]
    containers = [
        (value, value.copy())
        for module in modules
        for value in vars(module).values()
        if isinstance(value, (dict, list))
    ]
    configs = _caching_configs(modules) if train else []
    memoized = [(cache, cache.cache_info().misses) for cache in _caches(modules)]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True
        for cache, misses in memoized:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        _put_back(attributes, containers)


def _caching_configs(modules: list[nn.Module]) -> list[Any]:
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]


def _caches(modules: list[nn.Module]) -> Iterator[Any]:
    """The memoized functions of the modules' classes and of the files that these are in, bare or in a wrapper."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    files = {id(file): vars(file) for cls in classes if (file := sys.modules.get(cls.__module__))}
    for place in [*map(vars, classes), *files.values()]:
        for value in list(place.values()):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
            inner = [cell.cell_contents for cell in cells if cell != _EMPTY_CELL]
            yield from (each for each in (function, *inner) if isinstance(each, _MEMOIZED))


def _put_back(attributes: list[tuple[nn.Module, dict[str, Any]]], containers: list[tuple[Any, Any]]) -> None:
    for module, content in attributes:
        vars(module).clear()
        vars(module).update(content)
    for container, content in containers:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)


def state_names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers, each under its first name, and for every further name of a tied one its first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    kinds: Any = (parameters, model.named_parameters), (buffers, model.named_buffers)
    for found, named in kinds:
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) == name:
                found[name] = tensor
            else:
                aliases[name] = first[id(tensor)]
    return parameters, buffers, aliases


def with_aliases(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, and then again by the names of those tied to them."""
    yield from tensors.items()
    yield from ((alias, tensors[name]) for alias, name in aliases.items())


def swap(model: nn.Module, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    """Put tensors in the place of the parameters and buffers of these names and of those tied to them."""
    for name, tensor in with_aliases(tensors, aliases):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        place = module._parameters if leaf in module._parameters else module._buffers
        place[leaf] = tensor  # type: ignore[assignment]


def held(model: nn.Module, name: str) -> Any:
    """What the model now holds under the name of a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def plain_tensors(model: nn.Module) -> dict[int, str]:
    """The tensors that modules hold as plain attributes: for the id of each its name."""
    return {
        id(value): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def computed_tensors(model: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy: for tensors that modules hold and have computed, which torch does not copy, their values.

    ``torch.nn.utils.weight_norm`` leaves such a weight behind, and computes it anew in each forward.
    """
    held_tensors = [value for module in model.modules() for value in vars(module).values()]
    return {id(value): value.detach() for value in held_tensors if isinstance(value, torch.Tensor) and value.grad_fn}


def follow_modules(model: nn.Module, stack: list[str]) -> None:
    """Keep in ``stack`` the paths of the modules that are running, the innermost last."""
    for path, module in model.named_modules():
        module.register_forward_pre_hook(_push(stack, path), prepend=True)
        module.register_forward_hook(_pop(stack), always_call=True)


def _push(stack: list[str], path: str) -> Callable[..., None]:
    return lambda module, args: stack.append(path)


def _pop(stack: list[str]) -> Callable[..., None]:
    def pop(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return pop


@contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In the block an attribute has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Activation checkpoints are plain calls: a dropout inside is drawn once, what is recomputed is decided later."""
    reentrant = type("Plain", (), {"apply": staticmethod(lambda function, preserve, *args: function(*args))})
    with (
        changed(
            torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", lambda *args, **kwargs: iter([None])
        ),
        changed(torch.utils.checkpoint, "CheckpointFunction", reentrant),
    ):
        yield


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Parameters and buffers by kind and name, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield ("parameter", name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield ("buffer", name), buffer
