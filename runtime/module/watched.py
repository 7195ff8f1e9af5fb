"""A model that is looked at before every call, and described anew where something changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from shardc.capture.guards import GuardError
from shardc.capture.model import tensors_of
from shardc.capture.signature import APART, CONTAINERS, State, fingerprint, model_state
from shardc.language.errors import CaptureError

from .step import Step

MAX_STATES = 32  # that may come again, as of train() and eval()
HELD = ("_parameters", "_buffers", "_modules")
SETTLED = (  # the same object says the same
    bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device,
    FunctionType, BuiltinFunctionType, ModuleType, nn.Module,
)  # fmt: skip


class Watched:
    """A model whose state and tensors are asked for again and again.

    State: ``state`` and ``tensors`` (parameters and buffers by kind and name, tied ones under each of their names), as
    found at the last look; and what shows that they still hold: the dicts of all modules, each with its version, which
    containers were empty, and what all else that may change in place was described as.
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
        return [fingerprint(value, memo) for value in self._mutable]


def _is_settled(value: Any) -> bool:
    return isinstance(value, SETTLED) or (type(value) is tuple and all(map(_is_settled, value)))


MAX_VARIANTS = 8


class Variants:
    """Steps that differ in what their guards must find; without guards there is one.

    State: ``steps``, the latest used first.
    """

    def __init__(self, step: Step) -> None:
        self.steps = [step]

    @property
    def latest(self) -> Step:
        """The step that ran last."""
        return self.steps[0]

    def run(self, run: Callable[[Step], Any], compile: Callable[[], Step]) -> Any:
        """What the first step gives whose guards all hold, a new one if need be.

        A step whose guard does not hold ends there, on every rank alike, and has changed nothing. CaptureError where
        too many were compiled already, GuardError where not even a new one finds what it was captured with.
        """
        for i, step in enumerate(self.steps):
            try:
                result = run(step)
            except GuardError as error:
                latest = error
                continue
            self.steps.insert(0, self.steps.pop(i))
            return result
        if len(self.steps) == MAX_VARIANTS:
            raise _too_many(latest) from latest
        self.steps.insert(0, compile())
        return run(self.steps[0])


def _too_many(error: GuardError) -> CaptureError:
    return CaptureError(
        error.who,
        f"what it finds in values is part of a program, and {MAX_VARIANTS} were compiled already; now {error.finding}",
        "let no shape depend on values: torch.where(mask, new, old) for what a mask selects, ignore_index for rows "
        "that no loss counts, padding to one length; or do it outside of the model and pass what is found",
    )
