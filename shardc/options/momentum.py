"""The ``momentum`` option: ranks send Adam's momentum in place of gradients (1-bit Adam)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardc.language.errors import OptionError
from shardc.language.mesh import Mesh
from shardc.wire import Wire, check_wire, codec_named

from .pipeline import Pipeline
from .zero import Zero


@dataclass(frozen=True, slots=True)
class Momentum:
    """After some steps, Adam's momentum is sent in place of gradients whose codec has feedback; the variance is kept.

    The error of a ``1bit`` or ``topk`` gradient would disturb the variance. That of a momentum does not, since momentum
    changes slowly. From then on ``.grad`` of the parameters concerned holds the momentum, which ``torch.optim.Adam`` or
    ``AdamW`` takes. Several backwards may add to it, if nothing else changes it in between. Sources: Tang et al. 2021
    (1-bit Adam), Lu et al. 2022 (0/1 Adam).

    ``after``: the number of first steps, with whole gradients, until the variance is stable: a fifth of training or
    more. In later steps Adam changes no element by more than the learning rate, since a kept variance is too small
    where gradients grow.
    ``every``: one later step in ``every`` has whole gradients too, and renews the variance; each of these gradients
    counts for ``every`` steps. By default no later step has any.
    ``beta``: the first of the optimizer's ``betas``. ``before``: the ``wire`` of steps with whole gradients; by default
    values are sent without a codec.
    """

    after: int
    every: int | None = None
    beta: float = 0.9
    before: Wire | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if type(self.after) is not int or self.after < 1:
            what, problem = f"after={self.after!r}", "it counts the optimizer's steps before, 1 or more"
            raise OptionError("Momentum", what, problem, "say after=500")
        if self.every is not None and (type(self.every) is not int or self.every < 2):
            what, problem = f"every={self.every!r}", "one step in so many renews the variance, 2 or more"
            raise OptionError("Momentum", what, problem, "say every=8, or leave it out")
        if not isinstance(self.beta, float) or not 0 < self.beta < 1:
            what, problem = f"beta={self.beta!r}", "it is the first of Adam's betas, between 0 and 1"
            raise OptionError("Momentum", what, problem, "say beta=0.9")

    @property
    def text(self) -> str:
        """The option as Python source, with ``after`` and ``every`` alone."""
        return f"Momentum({self.after}{f', every={self.every}' if self.every else ''})"

    def is_sent(self, steps: int) -> bool:
        """Whether the step after ``steps`` steps sends the momentum."""
        return steps >= self.after and not (self.every and (steps - self.after + 1) % self.every == 0)

    def check(self, mesh: Mesh, wire: Wire | None, zero: Zero | None, pipeline: Pipeline | None) -> None:
        """Raise an OptionError if it does not fit the other options."""
        if self.before is not None:
            check_wire(self.before, mesh)
            if any(map(_has_feedback, self.before.values())):
                what, problem = f"before={self.before!r}", "what is left out then is not what is left out later"
                raise OptionError(self.text, what, problem, "say int8, or leave it out")
        if not any(map(_has_feedback, (wire or {}).values())):
            what, problem = f"with wire={wire!r}", "nothing is sent in a codec with feedback"
            raise OptionError(self.text, what, problem, "say wire={'dp': '1bit'}")
        unfit = (
            ("zero", zero, "a rank has a part of the momentum"),
            ("pipeline", pipeline, "it computes gradients before a backward asks for them"),
        )
        for name, given, problem in unfit:
            if given is not None:
                raise OptionError(self.text, f"with {name}=", problem, f"leave {name} out, or say int8")


def _has_feedback(codec: Any) -> bool:
    return codec is not None and codec_named(codec).has_feedback
