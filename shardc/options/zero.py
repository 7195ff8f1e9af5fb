"""ZeRO: parameters, gradients and optimizer states cut over data parallel axes between uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.mesh import Mesh

from .axis import check_axis

STAGES = (1, 2, 3)
Offloaded = Literal["optimizer", "parameters"]
OPTIMIZER: Offloaded = "optimizer"
PARAMETERS: Offloaded = "parameters"
OFFLOADED = (OPTIMIZER, PARAMETERS)
HOST = "host"


@dataclass(frozen=True, slots=True)
class Zero:
    """Cut every parameter, its gradient and its optimizer state over one more mesh axis, or several, between uses.

    ``stage`` 3 gathers a parameter where it is used and frees it afterwards, and does so again in backward. A stage of
    a Pipeline gathers it once a step, for all microbatches. Stages 1 and 2 keep one gathered copy between steps, which
    is gathered again once the optimizer has written the parameters. Stages 2 and 3 reduce_scatter each gradient where
    it is computed; stage 1 once a step, after the last backward.

    ``gather_over``: the axes on fast links, if the others are on slow links. A parameter is then gathered in two steps:
    over the slow axes, which gives each rank a piece of it, and over the fast axes. Stage 3 keeps the piece until
    backward, which gathers over the fast axes alone. A gradient is reduced over the fast axes first, so that the slow
    axes carry a piece of it. An axis that only ``gather_over`` names cuts the stored values too. A parameter is
    gathered and reduced in one step if none of its dims is a multiple of the number of ranks along all these axes.

    ``offload``: the values to store in the tier below the device's memory. ``to``: that tier, host memory or the
    absolute path of a folder for files. ``"optimizer"`` keeps parameters, gradients and optimizer states there, and the
    optimizer steps there; the device keeps a copy of each parameter to compute on, fetched again after the optimizer's
    step. With ``"parameters"`` the device keeps no copy: each parameter is fetched one layer ahead of its use, in
    forward and again in backward. Both are of use on axes of one rank too.

    Sources: ZeRO, Rajbhandari et al. 2020; hpZ and qgZ of ZeRO++, Wang et al. 2023; ZeRO-Offload, Ren et al. 2021;
    ZeRO-Infinity, Rajbhandari et al. 2021.
    """

    axis: str | tuple[str, ...] = "dp"
    stage: Literal[1, 2, 3] = 3
    gather_over: str | tuple[str, ...] | None = None
    offload: Offloaded | None = None
    to: str | os.PathLike[str] = HOST

    def __post_init__(self) -> None:
        for name in ("axis", "gather_over"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise OptionError("Zero", f"stage={self.stage!r}", "there is no such stage", "say 1, 2 or 3")
        if self.gather_over is not None and not self.slow_axes:
            problem, remedy = "no axis is left to gather over before", "name the axes on slow links too, as axis"
            raise OptionError(self._who, f"gather_over={self.gather_over!r}", problem, remedy)
        self._check_offload()

    def _check_offload(self) -> None:
        if isinstance(self.to, os.PathLike) or (isinstance(self.to, str) and os.path.isabs(self.to)):
            object.__setattr__(self, "to", os.path.normpath(self.to))
        if self.offload is not None and self.offload not in OFFLOADED:
            remedy = did_you_mean(str(self.offload), OFFLOADED) or f"say one of {', '.join(map(repr, OFFLOADED))}"
            raise OptionError(self._who, f"offload={self.offload!r}", "no such thing is offloaded", remedy)
        if self.to != HOST and not (isinstance(self.to, str) and os.path.isabs(self.to)):
            problem, remedy = "it is no absolute path of a folder", f"say to={HOST!r}, or to='/scratch'"
            raise OptionError(self._who, f"to={self.to!r}", problem, remedy)
        if self.to != HOST and self.offload is None:
            remedy = f"say offload={PARAMETERS!r} or offload={OPTIMIZER!r} too"
            raise OptionError(self._who, f"to={self.to!r}", "nothing is offloaded", remedy)
        if self.offload == PARAMETERS and self.stage != 3:
            what, problem = f"stage={self.stage}, offload={self.offload!r}", "it keeps parameters whole on the device"
            raise OptionError(self._who, what, problem, f"say stage=3, or offload={OPTIMIZER!r}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts the stored values."""
        return tuple(dict.fromkeys((*_names(self.axis), *self.fast_axes)))

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """The axes of ``gather_over``."""
        return _names(self.gather_over)

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """The axes that are not in ``gather_over``."""
        return tuple(axis for axis in self.axes if axis not in self.fast_axes)

    @property
    def text(self) -> str:
        """The option as Python code."""
        return repr(self)

    def __repr__(self) -> str:
        over = "" if self.gather_over is None else f", gather_over={self.gather_over!r}"
        below = "" if self.offload is None else f", offload={self.offload!r}"
        to = "" if self.to == HOST else f", to={self.to!r}"
        return f"Zero(axis={self.axis!r}, stage={self.stage}{over}{below}{to})"

    @property
    def flag(self) -> str:
        """The option as one types it on the command line: ``dp=3``, or ``dp+node=3,gather_over=node``."""
        over = f",gather_over={'+'.join(self.fast_axes)}" if self.fast_axes else ""
        below = "" if self.offload is None else f",offload={self.offload}"
        to = "" if self.to == HOST else f",to={self.to}"
        return f"{'+'.join(self.axes)}={self.stage}{over}{below}{to}"

    def renamed(self, names: Mapping[str, str]) -> Zero:
        """This option with its axes renamed."""

        def rename(axes: Any) -> Any:
            return names[axes] if isinstance(axes, str) else axes and tuple(map(names.__getitem__, axes))

        return replace(self, axis=rename(self.axis), gather_over=rename(self.gather_over))

    @property
    def _who(self) -> str:
        return f"Zero({self.axis!r})"

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError if the mesh lacks one of the axes."""
        for axis in self.axes or (self.axis,):
            check_axis(self._who, axis, mesh)  # type: ignore[arg-type]


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)
