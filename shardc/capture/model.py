"""The user's model while it is captured: other tensors in place of its own, hooks on it, and all put back after."""

from __future__ import annotations

import functools
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

_MEMOIZED = functools._lru_cache_wrapper
_EMPTY_CELL = CellType()


@contextmanager
def borrowed(model: nn.Module, train: bool) -> Iterator[None]:
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
