"""1-bit Adam: after some steps with whole gradients, ranks send Adam's momentum in place of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.optimizer import Optimizer

from shardc.language.errors import OrderError, ShardingError
from shardc.options import Momentum

from ..module.accumulation import at_end_of_backward, reduce_now
from ..module.optimizer import VARIANCE_STEPS, StepWatcher, check_unscaling

LARGEST_CHANGE = 1.0  # of an element, in learning rates: a kept variance is too small where gradients have grown

Parameters = Callable[[], Mapping[str, Tensor]]


@dataclass(slots=True)
class StepGradient:
    """The gradient of a parameter in a step, from one backward or several.

    ``is_whole``: it is no momentum, and will be none. ``has_momentum``: the momentum is in it, so that further
    gradients are added without one. ``backward``: the last backward that added to it; after that one ``gradient`` and
    ``version`` are the ``.grad`` and its version.
    """

    is_whole: bool
    has_momentum: bool = False
    backward: int = -1
    gradient: weakref.ref[Tensor] | None = None
    version: int = -1

    def note(self, gradient: Tensor | None) -> None:
        """Note the ``.grad`` after a backward."""
        if gradient is not None:
            self.gradient, self.version = weakref.ref(gradient), gradient._version

    def is_intact(self, gradient: Tensor | None, backward: int) -> bool:
        """Whether nothing but backwards has changed it since it began."""
        if gradient is None:
            return self.backward == backward
        return self.gradient is not None and self.gradient() is gradient and self.version == gradient._version


class MomentumSteps(StepWatcher):
    """1-bit Adam for the parameters of a module.

    Programs get the optimizer's momentum. Parameters whose ``.grad`` is the new momentum are stepped here, while the
    optimizer steps the others.

    The optimizer's state of such a parameter gets ``variance_steps``: the number of steps that its variance counts. A
    sent momentum adds none; a gradient that renews the variance adds the steps since the last such gradient.

    State: the ``_optimizer``, known from its first step or from a checkpoint; ``gradients``, by the id of their
    parameter; ``hidden``, during a step of the optimizer: parameter group, parameter and gradient of each that is
    stepped here.
    """

    sees_begin = True

    def __init__(self, option: Momentum, parameters: Parameters) -> None:
        super().__init__()
        self.option, self._parameters = option, parameters
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self.gradients: dict[int, StepGradient] = {}
        self.hidden: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        check_unscaling()

    @property
    def is_sent(self) -> bool:
        """Whether the next step sends the momentum."""
        optimizer = self._optimizer()
        states = [] if optimizer is None else [optimizer.state.get(each, {}) for each in self.watched()]
        return self.option.is_sent(max((int(state["step"]) for state in states if "step" in state), default=0))

    def watched(self) -> list[Tensor]:
        return list(self._parameters().values())

    def attach(self, optimizer: Optimizer) -> None:
        """Take the momenta of this optimizer from now on. Gradients that exist already count as whole gradients."""
        self._optimizer = weakref.ref(optimizer)
        self.gradients.clear()

    def check_unscale(self, optimizer: Optimizer) -> None:
        """Raise a ShardingError if gradients of an optimizer are momenta: those were not scaled with the loss."""
        sent = self.sent
        if any(id(each) in sent for group in optimizer.param_groups for each in group["params"]):
            problem = "the loss is scaled, the momentum is not"
            raise ShardingError(self.option.text, "with a GradScaler", problem, "use bfloat16 without one")

    def note_backward(self, sent: Iterable[str], trained: Iterable[str]) -> set[str]:
        """Note a backward. It computes gradients of the ``trained`` parameters; the program sends ``sent`` as momenta.

        Returns the names of the other parameters whose ``.grad`` is a momentum: their gradients have to be multiplied
        by 1 - beta before they are added to it.
        Raises an OrderError where a momentum would be added to a gradient of another step, or that was changed.
        """
        names, added, backward = set(sent), set[str](), torch._C._current_graph_task_id()
        own = self._own(trained)
        for name, parameter in own:
            if name in names:
                self._momentum(name, parameter)
            found = self.gradients.get(id(parameter))
            if found is None or not found.is_intact(parameter.grad, backward):
                self.gradients.pop(id(parameter), None)
                if parameter.grad is not None and name in names:
                    raise _has_gradient(name)
                if parameter.grad is not None:
                    continue
                found = self.gradients[id(parameter)] = StepGradient(is_whole=name not in names)
            elif found.is_whole and name in names:
                if parameter.grad is None:
                    raise _has_gradient(name)
                parameter.grad.mul_(1 - self.option.beta)
                found.is_whole = False
            elif not found.is_whole and name not in names:
                added.add(name)
            found.backward = backward
        at_end_of_backward(partial(self._note_gradients, [each for _, each in own]))
        return added

    def _note_gradients(self, parameters: Iterable[Tensor]) -> None:
        for each in parameters:
            if id(each) in self.gradients:
                self.gradients[id(each)].note(each.grad)

    def of(self, names: Iterable[str]) -> list[Tensor]:
        """The momenta of the named parameters, to which gradients are added; zeros if ``.grad`` has them already."""
        pairs = [(self._momentum(name, each), self.gradients.get(id(each))) for name, each in self._own(names)]
        return [torch.zeros_like(each) if found and found.has_momentum else each for each, found in pairs]

    def note_sent(self, names: Iterable[str]) -> None:
        """Note that momenta were sent."""
        for _, each in self._own(names):
            if (found := self.gradients.get(id(each))) is not None:
                found.has_momentum = True

    @property
    def sent(self) -> set[int]:
        """The ids of the parameters whose ``.grad`` is now a momentum, or will be once it is reduced."""
        return {each for each, found in self.gradients.items() if not found.is_whole}

    def _own(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        parameters = self._parameters()
        return [(name, parameters[name]) for name in names]

    def _momentum(self, name: str, parameter: Tensor) -> Tensor:
        """The optimizer's momentum of a parameter. Raises a ShardingError if it has none."""
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        if "exp_avg" not in state:
            what, problem = f"parameter {name!r}", "its optimizer has no momentum of it"
            remedy = "let all parameters be trained before, by one torch.optim.Adam or AdamW"
            raise ShardingError(self.option.text, what, problem, remedy)
        momentum: Tensor = state["exp_avg"]
        return momentum

    def note_begin(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Hide the gradients of parameters that are stepped here, so that the optimizer skips these parameters."""
        self._optimizer = weakref.ref(optimizer)
        for _, each, gradient in self.hidden:  # of a step that failed
            each.grad = gradient
        watched = {id(each) for each in self.watched()}
        pairs = [(group, each) for group in optimizer.param_groups for each in group["params"] if id(each) in watched]
        self._check(optimizer, {id(group): group for group, _ in pairs}.values(), has_closure and self.is_sent)
        reduce_now(each for _, each in pairs)
        sent = self.sent
        self.hidden = [
            (group, each, each.grad)
            for group, each in pairs
            if each.grad is not None and (id(each) in sent or VARIANCE_STEPS in optimizer.state.get(each, {}))
        ]
        for _, each, _ in self.hidden:
            each.grad = None

    def _check(self, optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], has_closure: bool) -> None:
        """Raise a ShardingError for an optimizer whose step ``note_step`` cannot compute."""
        who, remedy = f"a step of {type(optimizer).__name__}", "leave momentum= out"
        problem = f"{self.option.text} does its steps"
        wrong = "" if isinstance(optimizer, Adam) else "it is neither torch.optim.Adam nor AdamW"
        for group in [] if wrong else groups:
            if group["betas"][0] != self.option.beta:
                wrong, remedy = f"betas={tuple(group['betas'])}", f"say Momentum(..., beta={group['betas'][0]})"
            elif group["amsgrad"] or group["maximize"]:
                wrong = "amsgrad=True" if group["amsgrad"] else "maximize=True"
            elif group["weight_decay"] and not group["decoupled_weight_decay"]:
                wrong, remedy = f"weight_decay={group['weight_decay']} of Adam", "use AdamW"
        if has_closure:
            wrong, remedy = "a closure", "call backward before the step"
        if wrong:
            raise ShardingError(who, wrong, problem, remedy)

    @torch.no_grad()
    def note_step(self, optimizer: Optimizer) -> None:
        """Step the hidden parameters by Adam: by a sent momentum, which leaves the variance, or by a whole gradient."""
        sent, hidden, self.hidden = self.sent, self.hidden, []
        for group, parameter, gradient in hidden:
            state, lr, beta2 = optimizer.state[parameter], float(group["lr"]), group["betas"][1]
            counted = state.setdefault(VARIANCE_STEPS, state["step"].clone())
            state["step"] += 1
            if id(parameter) in sent:  # zero where there is no variance: unread rows of a table
                state["exp_avg"].copy_(gradient).mul_(state["exp_avg_sq"] > 0)
            else:
                num_steps = min(float(state["step"] - counted), self.option.every or 1)
                counted += num_steps
                state["exp_avg"].lerp_(gradient, 1 - self.option.beta)
                kept = beta2**num_steps
                state["exp_avg_sq"].mul_(kept).addcmul_(gradient, gradient, value=1 - kept)
            if group["weight_decay"]:
                parameter.mul_(1 - lr * group["weight_decay"])
            scale = (1 - beta2 ** float(counted)) ** 0.5
            deviation = (state["exp_avg_sq"].sqrt() / scale).add_(group["eps"])
            deviation.mul_(1 - self.option.beta ** float(state["step"]))
            parameter.add_((state["exp_avg"] / deviation).clamp_(-LARGEST_CHANGE, LARGEST_CHANGE), alpha=-lr)
            parameter.grad = gradient
        self.gradients.clear()


def _has_gradient(name: str) -> OrderError:
    what, problem = f"parameter {name!r} has a gradient already", "a momentum cannot be added to it"
    remedy = "call optimizer.zero_grad(set_to_none=True) before it, and change gradients after the last one"
    return OrderError("backward", what, problem, remedy)
