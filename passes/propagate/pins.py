"""The values whose sharding the user fixed, and who of them speaks first."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.language.errors import ShardingError, raise_all
from shardc.language.partition import P
from shardc.program.node import arguments, is_annotation
from shardc.program.program import Pin, Program
from shardc.program.provenance import DATA, PARAMETER, PARAMETER_FIRST, YIELDING

PARAMETER_KINDS = ("parameter", "buffer")


def annotated_values(program: Program) -> list[Pin]:
    """A pin for every ``shardc.annotate`` in the model; those that do not fit are one ShardingError."""
    pins: list[Pin] = []
    errors: dict[str, ShardingError] = {}
    for node in program.calls:
        if is_annotation(node):
            try:
                pins.append(_annotated_value(program, node))
            except ShardingError as error:
                errors.setdefault(str(error), error)  # the gradient's would say the same
    raise_all(list(errors.values()))
    return pins


def _annotated_value(program: Program, node: fx.Node) -> Pin:
    given, shape, source = arguments(node), program.type(node).shape, program.source(node)
    place = source.module or "the model"
    who = f"module {place!r}" if given["said"] else f"annotate in {place} ({source.location})"
    try:
        spec = P.parse(given["spec"], given["priority"])
    except ShardingError as error:
        raise ShardingError(who, error.what, error.problem, error.remedy) from None
    assert program.mesh is not None
    sharding = spec.sharding(program.mesh, shape, who)
    opened = frozenset(dim for dim in range(len(shape)) if spec.is_open(dim))
    return Pin(node.name, "value", sharding, opened, annotation_text(program, node), spec.priority)


def annotation_text(program: Program, node: fx.Node) -> str:
    """What an annotated value's pin and origins name: the annotation of a module, or a call in the model."""
    given = arguments(node)
    spec = P.parse(given["spec"], given["priority"])
    return str(given["said"]) or f"annotate({spec!r}) at {program.source(node).location}"


def promotion(pins: tuple[Pin, Pin]) -> str:
    """What the dump says of a pin that was moved into blocks."""
    before, after = pins
    return (
        f"{before.name}: {before.text} cuts each block that the model takes apart, {after.sharding}, not the whole dim"
    )


class Ranks:
    """Who speaks first about an axis: inputs and values, then parameters, then a value that yields to them.

    A value yields over an axis that only parameters have beside it, which is no axis of the data: a residual that is
    cut along time, by the axis that cuts the weights of each block, is gathered where these compute. A batch that is
    cut where it is embedded is data. Over the axes ``first`` parameters come before all.
    """

    def __init__(self, pins: Iterable[Pin], first: frozenset[str] = frozenset()) -> None:
        self.first = first
        axes: dict[str, set[str]] = {}
        for pin in pins:
            kind = "parameter" if pin.kind in PARAMETER_KINDS else pin.kind
            axes.setdefault(kind, set()).update(part.name for part in pin.sharding.cut_axes)
        self.model_axes = axes.get("parameter", set()) - axes.get("input", set())
        self.contested = sorted(axes.get("parameter", set()) & axes.get("input", set()))
        self.has_data = "input" in axes

    def of(self, pin: Pin) -> set[int]:
        """The ranks of a pin's dims."""
        return {self.rank(pin, dim) for dim in range(len(pin.sharding.dims))} or {DATA}

    def rank(self, pin: Pin, dim: int) -> int:
        """That of all axes that cut a dim, together."""
        if pin.kind in PARAMETER_KINDS:
            is_first = self.first & {part.name for part in pin.sharding.dims[dim].all_axes}
            return PARAMETER_FIRST if is_first else PARAMETER
        if pin.kind != "value":
            return DATA
        is_shared = any(part.name in self.model_axes for part in pin.sharding.dims[dim].all_axes)
        return YIELDING if is_shared and (self.has_data or dim) else DATA
