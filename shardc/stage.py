"""The stages of a pipeline: what each runs when, and what crosses between them.

A stage's work in a step has parts, in order:

- ``once``: what no microbatch changes: casts of parameters, causal masks
- ``count``: for each microbatch, sums over inputs that a later part divides by, as the number of valid tokens
- ``settle``: what is made of these sums
- ``forward``, ``input_gradient``, ``weight_gradient``: for each microbatch, in the order of a schedule. A stage's
  input gradient is all of its backward that another stage's backward waits for
- ``after``: once all sums over microbatches are whole: reductions over ranks, gradients, the loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from shardc.bucket import members
from shardc.collective import EXCHANGES, LOCAL_KINDS
from shardc.mesh import MICROBATCH
from shardc.program import Program
from shardc.sharding import Sharding

Part = Literal["once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after"]
PARTS: tuple[Part, ...] = ("once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after")
SCHEDULED: tuple[Part, ...] = ("forward", "input_gradient", "weight_gradient")
TIMED: tuple[Part, ...] = ("count", *SCHEDULED)  # run for each microbatch
PARTS_OF: Mapping[str, tuple[Part, ...]] = {  # what a schedule's action computes
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


@dataclass(frozen=True, slots=True)
class Crossing:
    """A way from one stage to another.

    Values go once a microbatch, after the part ``forward`` or ``input_gradient`` of its source; those ``after`` go once
    a step, when all microbatches are done.
    """

    source: int
    target: int
    part: Part


@dataclass(frozen=True, slots=True)
class Stage:
    """``parts``: its calls, in program order; one may be in ``count`` and in ``forward``. ``parameters`` that it holds.

    ``sums``: by the part that adds to them, reductions over microbatches, which are among no part's calls.
    """

    parts: Mapping[Part, tuple[fx.Node, ...]]
    sums: Mapping[Part, tuple[fx.Node, ...]]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a program, and the values that cross, in program order.

    ``home``: by index, for each output of which every microbatch has a part, the stage that makes it.
    """

    program: Program
    stages: tuple[Stage, ...]
    crossings: Mapping[Crossing, tuple[fx.Node, ...]]
    home: Mapping[int, int]

    @property
    def holders(self) -> dict[str, frozenset[int]]:
        """For each parameter that is read the stages that hold it."""
        inputs = zip(self.program.inputs, self.program.placeholders, strict=True)
        read = [put.name for put, node in inputs if put.kind == "parameter" and node.users]
        return {name: frozenset(i for i, stage in enumerate(self.stages) if name in stage.parameters) for name in read}


def has_stages(program: Program) -> bool:
    """Whether a program is a pipeline's, and so far that its stages can be read off it."""
    return program.options.pipeline is not None and program.level in ("lowered", "localized")


def is_sent(node: fx.Node) -> bool:
    """Whether ranks exchange values in a call."""
    return any(part.kind not in LOCAL_KINDS for part in members(node)) or node.target in EXCHANGES


def is_cut_in_time(sharding: Sharding | None) -> bool:
    """Whether every microbatch has a part of its own of a value."""
    return sharding is not None and any(part.name == MICROBATCH for part in sharding.used_parts)
