"""canonicalize: captured -> canonical. Fewer kinds of op, each with a rule that holds.

Losses and means become sums and divisions (losses.py). Random ops become draws by a counter (draw_random.py). Rows
sorted by expert stay where they are (unsort.py). Sums from the end of a dim become one op (scans.py). Triangles become
a choice by row and column (triangles.py). Views and constants get one form each (views.py)::

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
from shardc.ops.pointwise import ANNOTATE
from shardc.program.node import arguments, is_annotation, takes_device
from shardc.program.program import Program

from ..emitter import Emitter, Results, Rewrite
from .draw_random import draw_random
from .losses import LOSSES
from .scans import SCANS
from .triangles import TRIANGLES
from .unsort import KNOWN_PLACES, unsort
from .views import CONSTANTS, SAME, VIEWS

aten = torch.ops.aten


def canonicalize(program: Program) -> Program:
    """The program in fewer kinds of op, with the same values."""
    program = program.edited("canonical")
    draw_random(program)
    _rewrite(program, VIEWS | CONSTANTS | LOSSES | CONVOLUTIONS | SCANS | TRIANGLES)
    if unsort(program):
        _rewrite(program, KNOWN_PLACES)
    program.remove_dead()
    _separate_pinned_outputs(program)
    return program


def _rewrite(program: Program, rewrites: Mapping[Any, Rewrite]) -> None:
    for node in list(program.calls):
        if takes_device(node.target):  # a constant is made where the runtime computes, not where it was captured
            dropped = ("device", "pin_memory", "layout")
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in dropped}
        node.target = SAME.get(node.target, node.target)
        if node.target in rewrites:
            with program.graph.inserting_before(node):
                new = rewrites[node.target](program, node)
            if new is not None and new is not node:
                program.replace(node, new)


def _separate_pinned_outputs(program: Program) -> None:
    """Copy a pinned output that is also an input, an annotated value or another pinned output, so that pins differ."""
    pinned = {pin.name: pin for pin in program.pins if pin.kind == "output"}
    values_with_pin = {*program.placeholders, *filter(is_annotation, program.calls)}
    results = list(program.results)
    for i, output in enumerate(program.outputs):
        node, pin = results[i], pinned.get(output.name) if output.kind == "output" else None
        if node is None or pin is None:
            continue
        if node in values_with_pin:
            type_ = program.type(node)
            arguments = (node, str(P.of(pin.sharding, type_.shape, pin.open)), list(pin.priorities))
            with program.graph.inserting_before(program.output_node):
                node = program.insert(ANNOTATE, arguments, type_, node, {"text": pin.text})
            results[i] = node
        values_with_pin.add(node)
    program.output_node.args = (tuple(results),)


# Convolutions: the bias becomes an op of its own.


def _convolution(program: Program, node: fx.Node) -> Results:
    emit, given = Emitter(program, node), arguments(node)
    bias = given["bias"]
    if bias is None:
        return None
    result = emit(node.target, *(given | {"bias": None}).values())
    channels = [emit.shape(bias)[0], *[1] * (len(emit.shape(result)) - 2)]
    return emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, channels))


def _convolution_backward(program: Program, node: fx.Node) -> Results:
    """The gradient of the bias becomes a separate sum."""
    emit, given = Emitter(program, node), arguments(node)
    has_x, has_weight, has_bias = given["output_mask"]
    if not has_bias:
        return None
    dims = [dim for dim in range(len(emit.shape(given["grad_output"]))) if dim != 1]
    of_bias = emit(aten.sum.dim_IntList, given["grad_output"], dims)
    if not (has_x or has_weight):
        return None, None, of_bias
    without_bias = given | {"bias_sizes": None, "output_mask": [has_x, has_weight, False]}
    of_x, of_weight, _ = emit.results(emit(node.target, *without_bias.values()))
    return of_x, of_weight, of_bias


CONVOLUTIONS: dict[Any, Rewrite] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
