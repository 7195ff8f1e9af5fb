"""Pins, the values whose sharding the user fixed, and which of them comes first where two want one axis."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.language.errors import ShardingError, raise_all
from shardc.language.partition import P
from shardc.program.node import arguments, is_annotation
from shardc.program.program import Pin, Program, Value
from shardc.program.provenance import DATA, PARAMETER, PARAMETER_FIRST, YIELDING

PARAMETER_KINDS = ("parameter", "buffer")


def annotated_values(program: Program) -> list[Pin]:
    """A pin for every ``shardc.annotate`` in the model. Those that do not fit raise one ShardingError."""
    pins: list[Pin] = []
    errors: dict[str, ShardingError] = {}
    for node in program.calls:
        if is_annotation(node):
            try:
                pins.append(_annotated_value(program, node))
            except ShardingError as error:
                errors.setdefault(str(error), error)  # the gradient's error is the same
    raise_all(list(errors.values()))
    return pins


def _annotated_value(program: Program, node: fx.Node) -> Pin:
    given, shape, source = arguments(node), program.type(node).shape, program.source(node)
    place = source.module or "the model"
    who = f"module {place!r}" if given["text"] else f"annotate in {place} ({source.location})"
    try:
        spec = P.parse(given["spec"], given["priority"])
    except ShardingError as error:
        raise ShardingError(who, error.what, error.problem, error.remedy) from None
    assert program.mesh is not None
    sharding = spec.sharding(program.mesh, shape, who)
    opened = frozenset(dim for dim in range(len(shape)) if spec.is_open(dim))
    return Pin(node.name, "value", sharding, opened, annotation_text(program, node), spec.priority)


def annotation_text(program: Program, node: fx.Node) -> str:
    """The annotation that an annotated value has: of a module as the user wrote it, or a call in the model."""
    given = arguments(node)
    spec = P.parse(given["spec"], given["priority"])
    return str(given["text"]) or f"annotate({spec!r}) at {program.source(node).location}"


def pinned_value(program: Program, pin: Pin) -> Value:
    """The value that a pin fixes."""
    if pin.kind == "value":
        return next((node, 0) for node in program.calls if node.name == pin.name)
    if pin.kind != "output":
        return program.value(program.named_inputs[pin.kind, pin.name])
    names = [output.name if output.kind == "output" else None for output in program.outputs]
    result = program.results[names.index(pin.name)]
    assert result is not None, pin
    return program.value(result)


class Precedence:
    """Which pin comes first over an axis: inputs and annotated values, then parameters, then values that yield to them.

    An annotated value yields over an axis that only parameters have beside it, and no input: a residual that is cut
    along time by the axis that cuts the weights of each block is gathered where these compute. A batch that is cut
    where it is embedded does not yield. Over the axes ``first`` parameters come before all.
    """

    def __init__(self, pins: Iterable[Pin], first: frozenset[str] = frozenset()) -> None:
        self._first = first
        axes: dict[str, set[str]] = {}
        for pin in pins:
            kind = "parameter" if pin.kind in PARAMETER_KINDS else pin.kind
            axes.setdefault(kind, set()).update(part.name for part in pin.sharding.cut_axes)
        self._model_axes = axes.get("parameter", set()) - axes.get("input", set())
        self._has_data = "input" in axes
        self.contested = sorted(axes.get("parameter", set()) & axes.get("input", set()))

    def of(self, pin: Pin) -> set[int]:
        """The ranks of a pin's dims; the lowest comes first."""
        return {self.of_dim(pin, dim) for dim in range(len(pin.sharding.dims))} or {DATA}

    def of_dim(self, pin: Pin, dim: int) -> int:
        """The rank of one dim of a pin, for all axes that cut it."""
        names = {part.name for part in pin.sharding.dims[dim].all_axes}
        if pin.kind in PARAMETER_KINDS:
            return PARAMETER_FIRST if self._first & names else PARAMETER
        is_shared = pin.kind == "value" and bool(self._model_axes & names)
        return YIELDING if is_shared and (self._has_data or dim) else DATA
