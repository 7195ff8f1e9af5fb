"""Calls of one module of a parallel module, such as an encoder that ``generate`` calls, run programs of their own.

Such a program has the names, the annotations and the shardings of the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

from torch import nn

SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Runtime(Protocol):
    """Runs a model, or a view of it."""

    model: nn.Module
    is_capturing: bool

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module | None = None) -> Any: ...


class SubmoduleView(nn.Module):
    """A model that is called at one of its modules: the model's names, the module's forward."""

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        for name in SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.path, self.training = path, model.training

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The module's own forward."""
        return own_forward(self.get_submodule(self.path))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward alone: the caller of the module runs its hooks."""
        return self.forward(*args, **kwargs)


class SubmoduleForward:
    """Replaces the forward of a module in a parallel module: a call from outside a program runs a program."""

    def __init__(self, runtime: Runtime, path: str, module: nn.Module) -> None:
        self._runtime, self._path, self._module = runtime, path, module
        self.own = vars(module).get("forward")  # a forward that was set on the module itself
        self._view = SubmoduleView(runtime.model, path)
        functools.update_wrapper(self, own_forward(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runtime.is_capturing:  # called by a forward that the user set in its place
            return (self.own or _class_forward(self._module))(*args, **kwargs)
        self._view.training = self._runtime.model.training
        return self._runtime.forward(args, kwargs, self._view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The forward of a copy of the module: its class's."""
        return _class_forward(memo[id(self._module)])

    def __reduce__(self) -> Any:
        return _class_forward, (self._module,)


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module without a SubmoduleForward in its place."""
    forward = module.forward
    if not isinstance(forward, SubmoduleForward):
        return forward
    return _class_forward(module) if forward.own is None else forward.own


def stand_for_forwards(runtime: Runtime) -> None:
    """Make every module of a runtime's model that has parameters run a program when it is called by itself.

    Modules with hooks that run before forward are left out: such a hook may compute a tensor that forward reads, such
    as a normalized weight.
    """
    for path, module in runtime.model.named_modules():
        if path and not module._forward_pre_hooks and next(module.parameters(), None) is not None:
            _put_back(module)
            module.__dict__["forward"] = SubmoduleForward(runtime, path, module)


@contextmanager
def own_forwards(model: nn.Module) -> Iterator[None]:
    """Context in which the modules of a model run their own forwards."""
    stood = {module: forward for module in model.modules() if (forward := _put_back(module)) is not None}
    try:
        yield
    finally:
        for module, forward in stood.items():
            module.__dict__["forward"] = forward


def _put_back(module: nn.Module) -> SubmoduleForward | None:
    """Remove a module's SubmoduleForward, restore its own forward, and return the removed one."""
    forward = vars(module).get("forward")
    if isinstance(forward, SubmoduleForward):
        del module.__dict__["forward"]
        if forward.own is not None:
            module.__dict__["forward"] = forward.own
        return forward
    if isinstance(forward, MethodType) and forward == _class_forward(module):  # in a copy
        del module.__dict__["forward"]
    return None
