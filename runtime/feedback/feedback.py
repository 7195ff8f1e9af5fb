"""What a module keeps from step to step for codes with feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

from shardc.options import Momentum

from .momentum import MomentumSteps
from .residuals import Residuals

if TYPE_CHECKING:
    from ..module.runtime import CompileFn, ModuleRuntime


@dataclass(slots=True)
class Feedback:
    """The residuals of a module, and its optimizer's momentum where that is sent.

    ``compile_before``: compiles a call for the steps before it is sent.
    """

    residuals: Residuals = field(default_factory=Residuals)
    momentum: MomentumSteps | None = None
    compile_before: CompileFn | None = None

    @property
    def sends_momentum(self) -> bool:
        """Whether the next step sends the momentum."""
        return self.momentum is not None and self.momentum.is_sent

    def send_momentum(self, runtime: ModuleRuntime, option: Momentum, compile_before: CompileFn) -> None:
        """Send the momentum of a runtime's parameters once the steps before are done."""
        self.momentum = MomentumSteps(option, lambda: dict(runtime.model.named_parameters()))
        self.compile_before = compile_before

    def attach(self, optimizer: Optimizer) -> None:
        """Note an optimizer of the module's parameters."""
        if self.momentum is not None:
            self.momentum.attach(optimizer)

    def copied(self, runtime: ModuleRuntime) -> Feedback:
        """What a copy of the module has of its own."""
        twin = Feedback(self.residuals.copied())
        if self.momentum is not None and self.compile_before is not None:
            twin.send_momentum(runtime, self.momentum.option, self.compile_before)
        return twin
