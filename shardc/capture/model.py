"""The user's model while it is captured: other tensors in place of its own, hooks on it, and all undone afterwards."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from shardc.language.errors import error_text


@contextmanager
def borrow(model: nn.Module, train: bool) -> Iterator[None]:
    """Undo at the end of the block whatever it did to the modules' attributes, tensors, hooks, containers and caches.

    With ``train`` a transformers model makes no key-value cache: ``config.use_cache`` is off in the block.
    """
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    before = copied_attributes(model)
    with ExitStack() as stack:
        stack.enter_context(_forget_cached_results(modules))
        for config in configs.values() if train else ():
            if getattr(config, "use_cache", None) is True:
                stack.enter_context(override_attribute(config, "use_cache", False))
        try:
            yield
        finally:
            for container, content in zip(*before, strict=True):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def copied_attributes(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The attribute dicts of all modules and the dicts and lists in them; and a copy of the contents of each."""
    containers: list[Any] = [vars(module) for module in model.modules()]
    containers += [value for own in containers for value in own.values() if isinstance(value, (dict, list))]
    return containers, [each.copy() if each else () for each in containers]  # most are empty


def are_unchanged(copied: tuple[list[Any], list[Any]]) -> bool:
    """Whether attributes, dicts and lists hold the objects that they held when they were copied."""
    return all(hold_same(own, before) for own, before in zip(*copied, strict=True))


def hold_same(one: Any, other: Any) -> bool:
    """Whether two dicts or lists hold the same objects, in the same order. An empty one may be an empty tuple."""
    ours, theirs = ([*each, *each.values()] if isinstance(each, dict) else each for each in (one, other))
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))


@contextmanager
def _forget_cached_results(modules: list[nn.Module]) -> Iterator[None]:
    """Clear, at the end of the block, every ``functools`` cache of the modules' code that got a new entry in the block.

    Such an entry may hold a fake tensor of the trace, which the model would return in its next eager call. The caches
    are the attributes of the modules' classes and of the files that define these. A cache may also be one cell of the
    closure of such an attribute: the ``compile_compatible_method_lru_cache`` of transformers keeps its cache there, and
    nothing public leads to it. A cache that got no entry in the block keeps what it has.
    """
    classes = {cls for module in modules for cls in type(module).__mro__}
    files = {cls.__module__: vars(sys.modules[cls.__module__]) for cls in classes if cls.__module__ in sys.modules}
    attributes = [value for owner in [*map(vars, classes), *files.values()] for value in list(owner.values())]
    functions = [getattr(value, "__func__", value) for value in attributes]  # of a static or class method
    cells = [cell for each in functions if isinstance(each, FunctionType) for cell in each.__closure__ or ()]
    candidates = [*functions, *(cell.cell_contents for cell in cells if cell != CellType())]  # that one is empty
    caches = [(each, each.cache_info().misses) for each in candidates if isinstance(each, functools._lru_cache_wrapper)]
    try:
        yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


@contextmanager
def override_attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In the block an attribute has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Run activation checkpoints as plain calls: dropout inside is drawn once; what to recompute is decided later."""
    plain_call = SimpleNamespace(apply=lambda function, preserve_rng_state, *args: function(*args))

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield  # between what checkpoints do before a call and after it; errors of the call pass

    home, name = torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"
    with (
        override_attribute(home, f"{name}_impl" if hasattr(home, f"{name}_impl") else name, generator),  # torch 2.14
        override_attribute(home, "CheckpointFunction", plain_call),
    ):
        yield


@contextmanager
def no_outer_checkpoint() -> Iterator[None]:
    """Hide the capture from a checkpoint around the call: from its dispatch mode, and from hooks on saved tensors."""
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    modes = _get_current_dispatch_mode_stack()
    is_selective = any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes)
    with (
        saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if has_hooks else nullcontext(),
        _disable_current_modes() if is_selective else nullcontext(),
    ):
        yield


# Tensors of a model by name.


def state_names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers, each under its first name, and for every further name of a tied one its first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    kinds: Any = (parameters, model.named_parameters), (buffers, model.named_buffers)
    for table, named in kinds:
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) == name:
                table[name] = tensor
            else:
                aliases[name] = first[id(tensor)]
    return parameters, buffers, aliases


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Parameters and buffers by kind and name, tied ones under each of their names."""
    yield from ((("parameter", name), x) for name, x in model.named_parameters(remove_duplicate=False))
    yield from ((("buffer", name), x) for name, x in model.named_buffers(remove_duplicate=False))


def with_aliases(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, and then again under every name that is tied to one of them."""
    yield from tensors.items()
    yield from ((alias, tensors[name]) for alias, name in aliases.items())


def replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Put tensors in the place of the parameters and buffers of these names and of those tied to them."""
    for name, tensor in with_aliases(tensors, aliases):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        place = module._parameters if leaf in module._parameters else module._buffers
        place[leaf] = tensor  # type: ignore[assignment]


def current_tensor(model: nn.Module, name: str) -> Any:
    """The tensor that the model has now under the name of a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that modules hold as plain attributes, by path; a tensor with several paths is under the last one."""
    paths = {
        id(value): (f"{path}.{name}" if path else name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    return dict(paths.values())


def computed_tensors(model: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy: the values of tensors that modules have computed and hold, which torch does not copy.

    ``torch.nn.utils.weight_norm`` leaves such a weight behind, and computes it anew in each forward.
    """
    return {id(value): value.detach() for value in plain_tensors(model).values() if value.grad_fn}


LIBRARIES = ("torch", "transformers", "accelerate", "peft", "shardc")  # whose hooks are part of their models


@contextmanager
def idle_hooks(model: nn.Module) -> Iterator[None]:
    """Warn of the user's hooks on modules that only observe: no step after capture runs them.

    A hook that returns a value, or sets an attribute of its module, is captured. To be used inside ``borrow``.
    """
    idle = dict[str, None]()
    for path, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            hooks: dict[int, Any] = getattr(module, kind)
            for key, hook in hooks.items():
                if _library_of(hook) not in LIBRARIES:
                    hooks[key] = _watched(hook, module, path or "(model)", idle)
    yield
    if idle:
        who, names = f"hooks of {type(model).__name__}", list(idle)
        more = f" and {len(names) - 8} more modules" if len(names) > 8 else ""
        what = f"those of {', '.join(names[:8])}{more} return nothing"
        problem = "they run while the model is captured, and in no step after"
        remedy = "return what they look at as an output, or set a hook on the module that parallelize returns"
        warnings.warn(error_text(who, what, problem, remedy), stacklevel=4)


def _library_of(hook: Any) -> str:
    """The first name of the package that a hook is defined in."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0]


def _watched(hook: Any, module: nn.Module, path: str, idle: dict[str, None]) -> Any:
    """The hook, which now also enters its module's path in ``idle`` if it has no effect on the capture."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = dict(vars(module))
        result, after = hook(*args, **kwargs), vars(module)
        if result is None and before.keys() == after.keys() and all(after[key] is before[key] for key in before):
            idle[path] = None
        return result

    return call


def follow_modules(model: nn.Module, stack: list[str]) -> None:
    """Keep in ``stack`` the paths of the modules that are running, the innermost last."""

    def pop(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    for path, module in model.named_modules():
        push: Any = lambda module, args, path=path: stack.append(path)  # noqa: E731
        module.register_forward_pre_hook(push, prepend=True)
        module.register_forward_hook(pop, always_call=True)
