"""The error-feedback state that a module keeps from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim.optimizer import Optimizer

from shardc.options import Momentum

from .momentum import MomentumSteps, Parameters
from .residuals import Residuals


@dataclass(slots=True)
class Feedback:
    """The residuals of a module, and its optimizer's momentum if that is sent in place of gradients.

    ``compile_before``: compiles a call that does not send the momentum: for the steps before, and outside training.
    """

    residuals: Residuals = field(default_factory=Residuals)
    momentum: MomentumSteps | None = None
    compile_before: Callable[..., Any] | None = None

    @property
    def sends_momentum(self) -> bool:
        """Whether the next step sends the momentum."""
        return self.momentum is not None and self.momentum.is_sent

    def send_momentum(self, option: Momentum, parameters: Parameters, compile_before: Callable[..., Any]) -> None:
        """Send the momentum of ``parameters``, a module's by name, in the steps in which the option says so."""
        self.momentum, self.compile_before = MomentumSteps(option, parameters), compile_before

    def attach(self, optimizer: Optimizer) -> None:
        """Register the optimizer of the module's parameters."""
        if self.momentum is not None:
            self.momentum.attach(optimizer)

    def copied(self, parameters: Parameters) -> Feedback:
        """The feedback state of a copy of the module, which has ``parameters``."""
        twin = Feedback(self.residuals.copied())
        if self.momentum is not None and self.compile_before is not None:
            twin.send_momentum(self.momentum.option, parameters, self.compile_before)
        return twin
