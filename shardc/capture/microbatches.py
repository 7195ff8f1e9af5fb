"""Microbatches: pins that cut the batch dims of a program's inputs, and ``stage_boundary`` marks inside a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from math import prod

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import WHOLE, DimSharding, Sharding, ceil_div
from shardc.options import Pipeline
from shardc.program.program import Input, Pin, Program


def with_microbatches(program: Program, pins: Iterable[Pin], pipeline: Pipeline, mesh: Mesh) -> Iterator[Pin]:
    """The pins of a program. Those of its inputs are also cut in microbatches, within their own cut.

    An input without an annotation is cut along its batch dim like the first input with one. ``mesh``: the program's.
    Raises an OptionError for an option ``batch`` that names no input or no dim of it.
    """
    inputs = {put.name: put for put in program.inputs if put.kind == "input"}
    dims = batch_dims(inputs, pipeline)
    pinned = {pin.name: pin for pin in pins if pin.kind == "input"}
    for pin in pins:
        if pin.kind == "output" and not pin.sharding.cut_axes and not pin.open:
            # A whole output may be computed in microbatches and gathered when it is returned.
            yield replace(pin, open=frozenset(range(len(pin.sharding.dims))), is_returned_whole=True)
        elif pin.kind != "input" or pin.name not in dims:
            yield pin
    annotated = ((pinned[name], dim) for name, dim in dims.items() if name in pinned)
    first, batch = next(((pin, pin.sharding.dims[dim]) for pin, dim in annotated if dim not in pin.open), (None, WHOLE))
    for name, dim in dims.items():
        ndim = len(inputs[name].type.shape)
        whole = Sharding(mesh, (WHOLE,) * ndim).with_dim(dim, DimSharding(batch.axes))
        text = first.text if first else pipeline.text
        pin = pinned.get(name, Pin(name, "input", whole, frozenset(range(ndim)), text))
        cut = pin.sharding.dims[dim]
        if cut.minor:
            what, problem = f"{pin.text} cuts blocks of dim {dim}", "that dim is cut in microbatches too"
            remedy = f"cut it by an axis, or say Pipeline(batch={{{name!r}: None}})"
            raise OptionError(f"input {name!r}", what, problem, remedy)
        sharding = replace(pin.sharding, mesh=mesh).with_dim(dim, DimSharding((*cut.axes, mesh.axis(MICROBATCH))))
        yield replace(pin, sharding=sharding, open=pin.open - {dim})


def empty_microbatches(program: Program, pins: Iterable[Pin], pipeline: Pipeline) -> Iterator[str]:
    """A note if microbatches are empty. All but the last one of a rank have equally many rows."""
    shapes = {put.name: put.type.shape for put in program.inputs if put.kind == "input"}
    input_pins = (pin for pin in pins if pin.kind == "input")
    for size, cut in chain.from_iterable(zip(shapes[pin.name], pin.sharding.dims, strict=True) for pin in input_pins):
        sizes = {part.name: part.size for part in cut.axes}
        count = sizes.pop(MICROBATCH, 1)
        rows = ceil_div(size, prod(sizes.values()))
        full = ceil_div(rows, ceil_div(rows, count)) if rows else count
        if full < count:
            yield (
                f"{pipeline.text}: {count - full} of {count} microbatches are empty, for a rank has {rows} "
                f"row{'s' * (rows != 1)} of the batch; say microbatches={full}"
            )
            return


def check_loss(program: Program) -> None:
    """Raise an OptionError unless backward starts from one number: it runs before gradients of outputs are known."""
    starts = [put for put in program.inputs if put.kind == "tangent"]
    problem = "backward runs within the forward call, and can start from one number alone"
    if len(starts) > 1:
        what = f"the outputs {', '.join(put.name for put in starts)} have gradients"
        raise OptionError("Pipeline", what, problem, "return their sum as the loss, and leave differentiable out")
    if starts and starts[0].type.shape:
        what = f"the output {starts[0].name!r} is {starts[0].type}"
        raise OptionError("Pipeline", what, problem, "return the loss, a 0-dim tensor, or run it under no_grad")


def batch_dims(inputs: Mapping[str, Input], pipeline: Pipeline) -> dict[str, int]:
    """The dim of each input that is cut in microbatches, by name."""
    unknown: list[OptionError] = []
    misfits: list[OptionError] = []
    for name, dim in pipeline.batch.items():
        if name not in inputs:
            remedy = did_you_mean(name, inputs) or f"name one of {', '.join(inputs)}"
            unknown.append(OptionError("Pipeline(batch=...)", f"{name!r}", "the model has no such input", remedy))
        elif dim is not None and not 0 <= dim < len(shape := inputs[name].type.shape):
            who, what = f"Pipeline(batch={{{name!r}: {dim}}})", f"it has shape {list(shape)}"
            remedy = f"say a dim from 0 to {len(shape) - 1}, or None" if shape else "say None"
            misfits.append(OptionError(who, what, "there is no such dim", remedy))
    raise_all([*unknown, *misfits])
    dims = {name: dim for name, dim in pipeline.batch.items() if dim is not None}
    sizes = [inputs[name].type.shape[dim] for name, dim in dims.items()]
    sizes += [put.type.shape[0] for put in inputs.values() if put.type.shape]
    for name, put in inputs.items():
        if name not in pipeline.batch and put.type.shape and put.type.shape[0] == sizes[0]:
            dims[name] = 0
    return dims


_PASSED: ContextVar[list[int]] = ContextVar("passed")  # one number: the marks so far in the traced model


def stage_boundary() -> None:
    """Mark inside a model that a new pipeline stage begins with the next op. Does nothing outside shardc."""
    if passed := _PASSED.get(None):
        passed[0] += 1


def marks_passed() -> int:
    """The number of ``stage_boundary`` calls so far in the model that is captured."""
    return _PASSED.get([0])[0]


@contextmanager
def counting_marks() -> Iterator[None]:
    """In the block marks are counted from 0."""
    token = _PASSED.set([0])
    try:
        yield
    finally:
        _PASSED.reset(token)
