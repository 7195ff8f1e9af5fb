"""What is looked at while a model is traced: where each node comes from, and what is read of values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardc.annotations import Match, annotate_output
from shardc.borrow import follow_modules
from shardc.constant import known_number
from shardc.fact import Phase, Source
from shardc.guard import DATA_DEPENDENT, Guards, NoValueError
from shardc.higher_order import REPLACED
from shardc.location import user_location
from shardc.refusal import OWN_COLLECTIVE, Refusals, Unfit
from shardc.stage_mark import marks_passed


class Watch(TorchDispatchMode):
    """Notes where in the user's model each traced node comes from; a backward node comes from its forward's place.

    What an op finds in values is guarded, unless the user's own line asks for it or there are no ``guards``.

    State: ``modules``, the paths of the running modules; ``by_sequence``, the source of the op that made the autograd
    node of that number; ``count`` of the calls of forward.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        annotations: Mapping[str, Match],
        stop: CodeType,
        refusals: Refusals,
        guards: Guards | None,
    ) -> None:
        super().__init__()
        self.stop, self.refusals, self.guards = stop, refusals, guards
        self.modules: list[str] = []
        self.phase: Phase = "forward"
        self.sources: dict[fx.Node, Source] = {}
        self.by_sequence: dict[int, Source] = {}
        self.latest, self.count = Source(), 0
        for path, entry in annotations.items():
            model.get_submodule(path).register_forward_hook(partial(_annotate_hook, entry))
        follow_modules(model, self.modules)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and str(func) in REPLACED:
            raise Unfit(f"{func} is called as an op", "call the function of torch of that name, which takes closures")
        if getattr(func, "namespace", "").removeprefix("_").startswith("c10d"):
            raise Unfit(*OWN_COLLECTIVE)
        mode = get_proxy_mode()
        assert mode is not None
        last = next(reversed(mode.tracer.graph.nodes))
        source = self._source()
        if _only_checks(func):
            return None
        try:
            return func(*args, **(kwargs or {}))
        except DATA_DEPENDENT as error:
            return self._found(error, func, args, kwargs or {}, source)
        finally:
            while (last := last.next).op != "root":
                self.sources[last] = source

    def _found(self, error: Exception, func: Any, args: Any, kwargs: Mapping[str, Any], source: Source) -> Any:
        """What an op finds in the values of tensors; the error where they are not known."""
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        if isinstance(error, DataDependentOutputException):
            with _disable_current_modes():
                number = known_number(next(reversed(tracer.graph.nodes)), tracer.root)
            if number is not None:
                return number
        if self.guards is None or self.refusals.is_users(isinstance(error, DataDependentOutputException)):
            raise error
        try:
            return self.guards.guarded(func, args, kwargs, source.location or "the model")
        except NoValueError as reason:
            raise error from reason

    def _source(self) -> Source:
        autograd_node = torch._C._current_autograd_node()
        if autograd_node is None and self.phase == "forward":
            line = user_location(sys._getframe(2), stop=self.stop)
            found = Source(self.modules[-1] if self.modules else "", line, marks=marks_passed(), ordinal=self.count)
            self.count += 1
            self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, found)
            return found
        if autograd_node is not None and (known := self.by_sequence.get(autograd_node._sequence_nr())):
            self.latest = replace(known, phase=self.phase)
        return self.latest


def _only_checks(func: Any) -> bool:
    """Whether an op of torch's own raises an error or does nothing: it looks at values, and capture has none."""
    return func.namespace == "aten" and not func._schema.returns and not func._schema.is_mutable


def _annotate_hook(entry: Match, module: nn.Module, args: Any, output: Any) -> Any:
    return annotate_output(output, entry)
