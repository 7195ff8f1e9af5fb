"""canonicalize: captured -> canonical. Fewer kinds of op, each with a rule that holds.

Losses and means become sums and divisions (losses.py), random ops become draws by a counter (draw_random.py), rows that
are sorted by expert stay where they are (unsort.py), and views and constants get one form each (views.py)::

    mean: f32[] = mean(x)                      sum: f32[] = sum(x);  div: f32[] = div(sum, 512)
    m: f32[8, 64] = bernoulli(x, 0.9)     ->   u = uniform(random, 8153, index);  lt = lt(u, 0.9);  m = _to_copy(lt)
    n: f32[8, 64] = clone(x)                   (x)

Invariant: every op is pure and every random op is ``uniform``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardc.language.partition import P
from shardc.program.node import is_annotation, takes_device
from shardc.program.program import Pin, Program

from ..emitter import Emitter, Results, Rewrite
from .draw_random import draw_random
from .losses import LOSSES
from .unsort import KNOWN_PLACES, unsort
from .views import CONSTANTS, SAME, VIEWS

aten = torch.ops.aten


def canonicalize(program: Program) -> Program:
    """The program in fewer kinds of op, with equal values."""
    program = program.copy(level="canonical")
    draw_random(program)
    _rewrite(program, VIEWS | CONSTANTS | LOSSES | CONVOLUTIONS)
    if unsort(program):
        _rewrite(program, KNOWN_PLACES)
    program.remove_dead()
    _separate_pinned_outputs(program)
    return program


def _rewrite(program: Program, rewrites: Mapping[Any, Rewrite]) -> None:
    for node in list(program.calls):
        _drop_device(node)
        node.target = SAME.get(node.target, node.target)
        if node.target in rewrites:
            with program.graph.inserting_before(node):
                new = rewrites[node.target](program, node)
            if new is not None and new is not node:
                program.replace(node, new)


def _separate_pinned_outputs(program: Program) -> None:
    """Copy a pinned output that is an input, an annotated value or another pinned output: its pin is then its own."""
    pinned = {pin.name: pin for pin in program.pins if pin.kind == "output"}
    taken = {*program.placeholders, *filter(is_annotation, program.calls)}
    results = list(program.results)
    for i, output in enumerate(program.outputs):
        node, pin = results[i], pinned.get(output.name) if output.kind == "output" else None
        if node is None or pin is None:
            continue
        if node in taken:
            results[i] = node = _annotated(program, node, pin)
        taken.add(node)
    program.output_node.args = (tuple(results),)


def _annotated(program: Program, node: fx.Node, pin: Pin) -> fx.Node:
    type_ = program.type(node)
    spec = str(P.of(pin.sharding, type_.shape, pin.open))
    with program.graph.inserting_before(program.output_node):
        return program.insert(
            torch.ops.shardc.annotate.default, (node, spec, pin.priority), type_, node, {"text": pin.text}
        )


def _drop_device(node: fx.Node) -> None:
    """A constant is made where the runtime computes: the device it was captured on says nothing."""
    if takes_device(node.target):
        dropped = ("device", "pin_memory", "layout")
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in dropped}


# Convolutions: the bias apart.


def _convolution(program: Program, node: fx.Node) -> Results:
    emit = Emitter(program, node)
    given = emit.given
    bias = given["bias"]
    if bias is None:
        return None
    result = emit(node.target, *(given | {"bias": None}).values())
    channels = [emit.shape(bias)[0], *[1] * (len(emit.shape(result)) - 2)]
    return emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, channels))


def _convolution_backward(program: Program, node: fx.Node) -> Results:
    """The bias's gradient is a sum of its own."""
    emit = Emitter(program, node)
    given = emit.given
    of_x, of_weight, of_bias = given["output_mask"]
    if not of_bias:
        return None
    dims = [dim for dim in range(len(emit.shape(given["grad_output"]))) if dim != 1]
    summed = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    if not (of_x or of_weight):
        return None, None, summed
    without = given | {"bias_sizes": None, "output_mask": [of_x, of_weight, False]}
    found = emit.results(emit(node.target, *without.values()))
    return found[0], found[1], summed


CONVOLUTIONS: dict[Any, Rewrite] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
