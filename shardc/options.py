"""The options of compile and parallelize: what is stored where between uses, in which precision, what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardc.error import ShardingError
from shardc.mesh import Mesh

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Zero:
    """Between uses every parameter, its gradient and its optimizer state lie cut over one more mesh axis.

    ``stage`` 3 gathers a parameter where it is used and frees it after, in backward once more. Stages 1 and 2 keep one
    gathered copy between steps, which is gathered again once the optimizer has written the parameters. Stages 2 and 3
    reduce_scatter each gradient where it is made; stage 1 once a step, after the last backward. Source: ZeRO,
    Rajbhandari et al. 2020.
    """

    axis: str = "dp"
    stage: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ShardingError("Zero", f"stage={self.stage!r}", "there is no such stage", "say 1, 2 or 3")

    def check(self, mesh: Mesh) -> None:
        """A ShardingError where the mesh has no such axis."""
        mesh.axis_size(self.axis)


@dataclass(frozen=True, slots=True)
class Options:
    """What a program is compiled with beside mesh and annotations."""

    zero: Zero | None = None

    def check(self, mesh: Mesh) -> None:
        """A ShardingError for an option that does not fit the mesh."""
        if self.zero is not None:
            self.zero.check(mesh)
