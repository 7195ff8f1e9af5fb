"""Hooks by which Accelerate and Trainer take a parallel module; for any other model they work as usual."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn

from ..module.module import ParallelModule

HOOKED = "_takes_parallel_modules"


def take_parallel_modules(model: nn.Module) -> None:
    """Let Accelerator and Trainer take parallel modules, if accelerate is imported.

    Imports the Trainer for a model of transformers or peft.
    """
    if "accelerate.accelerator" not in sys.modules:
        return
    if any(each.__module__.partition(".")[0] in ("transformers", "peft") for each in type(model).__mro__):
        with suppress(ImportError):
            import_module("transformers.trainer")
    _hook_accelerator(sys.modules["accelerate.accelerator"].Accelerator)
    if "transformers.trainer" in sys.modules:
        _hook_trainer(sys.modules["transformers.trainer"].Trainer)


def _hook_accelerator(kind: Any) -> None:
    """Make an Accelerator one device when it prepares a parallel module."""
    if HOOKED in vars(kind):
        return

    def hooked(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = next((each for each in (*args, *kwargs.values()) if isinstance(each, ParallelModule)), None)
            if model is None or getattr(self, "_is_one_device", False):
                return prepare(self, *args, **kwargs)
            from .accelerator import become_one_device

            become_one_device(self, model)
            if not getattr(self, "_is_one_device", False):
                return prepare(self, *args, **kwargs)
            return getattr(self, prepare.__name__)(*args, **kwargs)

        return run

    kind.prepare, kind.prepare_model = hooked(kind.prepare), hooked(kind.prepare_model)
    setattr(kind, HOOKED, True)


def _hook_trainer(kind: Any) -> None:
    """Let a Trainer take a parallel module, given as ``model`` or made by ``model_init``."""
    if HOOKED in vars(kind):
        return
    create, call_model_init = kind.create_accelerator_and_postprocess, kind.call_model_init

    def adopt(trainer: Any, model: Any) -> None:
        if isinstance(model, ParallelModule):
            from .trainer import adopt

            adopt(trainer, model)

    @functools.wraps(create)
    def created(self: Any) -> None:
        create(self)
        adopt(self, self.model)

    @functools.wraps(call_model_init)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = call_model_init(self, *args, **kwargs)
        adopt(self, model)
        return model

    kind.create_accelerator_and_postprocess, kind.call_model_init = created, initialized
    setattr(kind, HOOKED, True)
