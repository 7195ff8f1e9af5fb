"""The ``local`` option: groups of ranks train independently, and meet in an outer step every few steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.mesh import Mesh
from shardc.wire import EXAMPLES, Wire, codec_named, is_codec

from .axis import check_axis
from .pipeline import Pipeline
from .zero import Zero

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Outer = Callable[["Sequence[Tensor]"], "Optimizer"]


@dataclass(frozen=True, slots=True)
class Local:
    """Groups of ranks along an axis train independently, and take an outer step together every few steps (DiLoCo).

    A group is the ranks at one place along the axis, such as one data center. It computes the plan on the other axes,
    with its part of the inputs that are cut over this axis, and sends nothing over it. In an outer step each group
    sends the change of its parameters since the last outer step. The mean over groups is the gradient of an outer
    optimizer, and all groups continue from its result. Sources: Douillard et al. 2023 (DiLoCo), 2025 (Streaming
    DiLoCo).

    ``every``: the number of optimizer steps from one outer step to the next. ``outer``: makes the outer optimizer for a
    list of tensors; by default ``torch.optim.SGD`` with ``lr=0.7, momentum=0.9, nesterov=True``. ``wire``: the codec in
    which changes are sent. ``parts``: the number of parts of the parameters; each has outer steps of its own, at other
    times. ``patience``: the seconds that groups wait for each other. A late group is left out, and continues from the
    parameters of the others at its next outer step. By default groups wait as long as for any collective.
    ``groups``: the number of groups; by default the number of ranks along the axis. ``after``: the number of first
    optimizer steps after each of which all groups continue from the mean of their changes, until the model has begun to
    learn (post-local SGD, Lin et al. 2020).
    """

    axis: str
    every: int
    outer: Outer | None = field(default=None, hash=False)
    wire: str | None = None
    parts: int = 1
    patience: float | None = None
    groups: int | None = None
    after: int = 0

    def __post_init__(self) -> None:
        _check_count("every", self.every, "it counts the optimizer's steps from one outer step to the next", 20)
        _check_count("parts", self.parts, "it counts the parts of the parameters", 4)
        _check_count("after", self.after, "it counts the optimizer's first steps", 100, least=0)
        if self.parts > self.every:
            what, problem = f"parts={self.parts}, every={self.every}", "a step is the outer step of one part at most"
            raise OptionError("Local", what, problem, f"say parts={self.every} or less")
        if self.outer is not None and not callable(self.outer):
            problem = "it makes an optimizer of a list of tensors"
            example = "say outer=lambda tensors: torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)"
            raise OptionError("Local", f"outer={self.outer!r}", problem, example)
        if self.wire is not None and (not is_codec(self.wire) or codec_named(self.wire).has_feedback):
            known = [name for name in EXAMPLES if not codec_named(name).has_feedback]
            problem = "it is no codec in which changes are sent"
            remedy = did_you_mean(str(self.wire), known) or f"say one of {', '.join(known)}"
            raise OptionError("Local", f"wire={self.wire!r}", problem, remedy)
        if self.patience is not None and not (isinstance(self.patience, (int, float)) and self.patience > 0):
            what, problem = f"patience={self.patience!r}", "it is in seconds"
            raise OptionError("Local", what, problem, "say patience=60.0, or leave it out")

    @property
    def text(self) -> str:
        """The option as Python source, with ``axis`` and ``every`` alone."""
        return f"Local({self.axis!r}, every={self.every})"

    def check(self, mesh: Mesh, zero: Zero | None, pipeline: Pipeline | None, momentum: Any, wire: Wire | None) -> None:
        """Raise an OptionError if it does not fit the mesh or the other options."""
        check_axis(self.text, self.axis, mesh)
        if self.groups is not None and mesh.axis_size(self.axis) not in (1, self.groups):
            problem = f"there are {mesh.axis_size(self.axis)} along {self.axis}"
            raise OptionError(self.text, f"groups={self.groups}", problem, "leave groups out")
        if pipeline is not None and pipeline.axis == self.axis:
            problem = "a group has all stages of the pipeline"
            raise OptionError(
                self.text, f"with Pipeline({pipeline.axis!r})", problem, "name another axis in one of them"
            )
        if zero is not None and self.axis in zero.axes:
            problem = "a group has all of its parameters"
            raise OptionError(self.text, f"with {zero.text}", problem, "name another axis in one of them")
        coded = next((key for key in wire or {} if self.axis in key.split()), None)
        if wire and coded is not None:
            what, problem = f"with wire={{{coded!r}: {wire[coded]!r}}}", "all that it sends is changes of parameters"
            raise OptionError(self.text, what, problem, f"say Local(..., wire={wire[coded]!r}) in place of it")
        if momentum is not None:
            what, problem = f"with {momentum.text}", "what its steps send is no change of parameters"
            raise OptionError(self.text, what, problem, "leave momentum out")

    def group_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of one group: the whole mesh with one rank along the axis."""
        if mesh.axis_size(self.axis) == 1:
            return mesh
        group = Mesh(device_ids=None, **{**mesh.sizes, self.axis: 1})
        group.stage_axis = mesh.stage_axis
        return group

    def among(self, mesh: Mesh) -> Local:
        """The option as a program stores it: with the number of groups, and without the function ``outer``."""
        return replace(self, groups=self.groups or mesh.axis_size(self.axis), outer=None)


def _check_count(name: str, value: Any, problem: str, example: int, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise OptionError("Local", f"{name}={value!r}", f"{problem}, {least} or more", f"say {name}={example}")
