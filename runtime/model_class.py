"""The class of a parallel module: a subclass of the model's, whose methods call the parallel module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType, new_class
from typing import Any

import torch
from torch import nn

from shardc.language.errors import ShardingError

from .checkpoint.export import saving
from .module.generation import LENGTH, generating, preparing
from .module.module import FORWARD, MODEL, ParallelModule, refuse_compiling
from .module.runtime import ModuleRuntime


def module_of(kind: type[ParallelModule], runtime: ModuleRuntime) -> ParallelModule:
    """The parallel module of a runtime; its class is a subclass of the model's."""
    cls: type[ParallelModule] = _class_of(kind, type(runtime.model))  # type: ignore[arg-type]
    return cls.of(runtime)


@functools.cache
def _class_of(kind: Any, model: Any) -> Any:
    """A subclass of both classes with the name of the model's, which transformers writes to ``config.json``."""
    body: dict[str, Any] = {"__slots__": (), "__module__": model.__module__, "__qualname__": model.__qualname__}
    body |= {"forward": _Forward(model), MODEL: model}
    if callable(getattr(model, "generate", None)):
        body |= {"__slots__": LENGTH, "generate": generating(model.generate)}
    if callable(prepare := getattr(model, "_prepare_static_cache", None)):
        body["_prepare_static_cache"] = preparing(prepare)
    if callable(save := getattr(model, "save_pretrained", None)):
        body["save_pretrained"] = saving(save)
    try:
        return new_class(model.__name__, (kind, model), {}, lambda namespace: namespace.update(body))
    except TypeError as error:
        remedy = "leave __slots__ and arguments of its metaclass out of it, or wrap the model in a plain module"
        raise ShardingError(f"the class {model.__name__}", "it has no subclass", str(error), remedy) from error


class _Forward:
    """The forward of a class of parallel modules: runs the model, and has the signature and docstring of its forward.

    A forward that is set on a module replaces it for that module, and leaves the model's own, which is captured.
    """

    def __init__(self, model: type[nn.Module]) -> None:
        @functools.wraps(model.forward)
        def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                refuse_compiling(type(self).__name__)
            return self.shardc.forward(args, kwargs)

        self.function = forward

    def __get__(self, module: ParallelModule | None, kind: type[ParallelModule]) -> Callable[..., Any]:
        if module is None:
            return self.function
        return module._shardc_forward or MethodType(self.function, module)

    def __call__(self, module: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return self.function(module, *args, **kwargs)

    def __set__(self, module: ParallelModule, value: Callable[..., Any]) -> None:
        object.__setattr__(module, FORWARD, value)

    def __delete__(self, module: ParallelModule) -> None:
        object.__setattr__(module, FORWARD, None)
