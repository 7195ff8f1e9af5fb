"""A plan: the axes of a mesh, the decisions that each axis cuts, and options; with the annotations of a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardc.language.machine import Machine
from shardc.language.mesh import Mesh
from shardc.language.partition import ZIGZAG, P
from shardc.options import Options, Pipeline, Precision, Remat, Saved, Zero
from shardc.search.space.decision import Decision, Place
from shardc.wire import Wire, wire_on

Cuts = frozenset[Decision]
OPTIONS = ("zero", "remat", "precision", "pipeline", "overlap", "saved")  # options of a plan, in the order of printing


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, and the decisions that it cuts.

    ``is_by_rows``: each decision is annotated at the seed with the lowest dim, not at its first seed. This matters if
    two decisions cut different dims of one tensor, as along a chain of layers: the tensor gets the annotated cut.
    ``in_zigzag``: if this axis alone cuts positions of inputs, each rank has an early and a late stretch of them.
    ``has_samples``: the user's annotations cut the first dim of an input over it.
    """

    name: str
    size: int
    cuts: Cuts = frozenset()
    is_by_rows: bool = False
    in_zigzag: bool = False
    has_samples: bool = False

    @property
    def cuts_samples(self) -> bool:
        """Whether its ranks have samples of their own."""
        return self.has_samples or any(each.kind == "samples" for each in self.cuts)

    @property
    def cuts_positions(self) -> bool:
        """Whether its ranks have positions of their own."""
        return any(each.kind == "inputs" for each in self.cuts)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, one point of the search.

    ``axes``: the axes that cut, the outermost first. ``given``: annotations that the user wrote, which stay.
    ``written``: annotations that replace those of the axes. ``pipeline``: cuts the model over ``num_stages`` ranks, on
    an axis before the others. The other options are those of ``compile``.
    """

    axes: tuple[Axis, ...]
    given: tuple[tuple[str, P], ...] = ()
    written: tuple[tuple[str, P], ...] | None = None
    zero: Zero | None = None
    remat: Remat | None = None
    precision: Precision | None = None
    pipeline: Pipeline | None = None
    num_stages: int = 1
    overlap: str | None = None
    saved: Saved | None = field(default=None, hash=False)

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh of one stage."""
        return Mesh(device_ids=None, **{axis.name: axis.size for axis in self.axes})

    @property
    def mesh(self) -> Mesh:
        """The whole mesh, without axes of one rank if there are others."""
        sizes = {self.pipeline.axis: self.num_stages} if self.pipeline else {}
        sizes |= {axis.name: axis.size for axis in self.axes if axis.size > 1}
        return Mesh(device_ids=None, **sizes or {axis.name: axis.size for axis in self.axes})

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes that cut anything, in ascending order."""
        named = {axis for spec in self.annotations.values() for axis in spec.axes}
        named |= {*(self.zero.axes if self.zero else ()), *([self.pipeline.axis] if self.pipeline else [])}
        return tuple(sorted(size for name, size in self.mesh.sizes.items() if name in named))

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by name."""
        return {name: option for name in OPTIONS if (option := getattr(self, name)) is not None}

    def compiler_options(self, optimizer: str, wire: Wire | None, machine: Machine | None = None) -> Options:
        """The options of a compilation."""
        wire = wire_on(wire, self.mesh.axis_names)
        return Options(**self.options, machine=machine or Machine(), optimizer=optimizer, wire=wire)

    @property
    def annotations(self) -> dict[str, P]:
        """The ``written`` annotations, or else those of the axes, with other dims open, and the ``given`` ones."""
        if self.written is not None:
            return dict(self.written)
        cut_over: dict[Place, set[str]] = {}  # two decisions may be annotated at one dim
        for place, names in self.places().values():
            cut_over.setdefault(place, set()).update(names)
        dims: dict[str, dict[int, list[str]]] = {}
        for place, cut in cut_over.items():
            axes = [axis for axis in self.axes if axis.name in cut]
            names = [axis.name for axis in axes]
            if place.dim and place.pattern.startswith("input:") and len(axes) == 1 and axes[0].in_zigzag:
                names = [f"{names[0]}:{ZIGZAG}"]
            dims.setdefault(place.pattern, {})[place.dim] = names
        return {pattern: _spec(of_dims) for pattern, of_dims in dims.items()} | dict(self.given)

    def places(self) -> dict[Decision, tuple[Place, list[str]]]:
        """By decision: the seed to annotate, if possible in a tensor that its axes do not cut yet, and these axes."""
        axes: dict[Decision, list[str]] = {}
        for axis in self.axes:
            for decision in sorted(axis.cuts, key=lambda each: (each.kind != "samples", str(each))):
                if axis.size > 1:
                    axes.setdefault(decision, []).append(axis.name)
        by_rows = {decision for axis in self.axes if axis.is_by_rows for decision in axis.cuts}
        taken, places = dict[str, set[str]](), dict[Decision, tuple[Place, list[str]]]()
        for decision, names in axes.items():
            seeds = sorted(decision.seeds, key=lambda each: each.dim) if decision in by_rows else decision.seeds
            free = [seed for seed in seeds if taken.get(seed.pattern, set()).isdisjoint(names)]
            seed = (free or seeds)[0]
            taken.setdefault(seed.pattern, set()).update(names)
            places[decision] = seed, names
        return places


def _spec(dims: Mapping[int, list[str]]) -> P:
    """The annotation with these cuts; all other dims are open."""
    entries = [P.OPEN if dim not in dims else _entry(dims[dim]) for dim in range(max(dims) + 1)]
    return P(*entries, ...)


def _entry(axes: list[str]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else tuple(axes)
