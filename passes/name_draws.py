"""name_draws: captured -> captured. Each draw of an initialiser is named by the parameter that it is for.

What was overwritten goes first: a parameter is often drawn by its module and then again by the model::

    u: f32[8, 6] = uniform(empty)           ->      e: f32[8, 6] = unwritten([8, 6], float32)
    n: f32[8, 6] = normal_functional(u)             n: f32[8, 6] = normal_functional(e)

Then the n-th draw that the value of ``down.weight`` needs is keyed by ``down.weight#n``, whatever else the model draws,
and whether its constructor or its modules' initialisers were recorded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.node import ancestors, arguments
from shardc.ops.creation import unwritten
from shardc.program import Program

from .emitter import Emitter

aten = torch.ops.aten
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default}
_DRAWS = ("uniform", "exponential", "log_normal", "cauchy", "geometric", "random", "normal_functional")
_OVERWRITES = {
    *(getattr(aten, name).default for name in (*_DRAWS, "zero", "copy")),
    *(aten.random.to, aten.bernoulli.p, aten.fill.Scalar, aten.fill.Tensor),
}


def name_draws(program: Program) -> Program:
    """The program of the values of parameters, each draw from the module path that is a parameter's name."""
    program = program.copy()
    for node in list(program.calls):
        with program.graph.inserting_before(node):
            if node.target in _OVERWRITES:
                _forget(program, node)
            elif node.target in _EMPTY:
                program.replace(node, _unwritten(program, node))
    program.remove_dead()
    named: set[fx.Node] = set()
    for output, result in zip(program.outputs, program.results, strict=True):
        fresh = ancestors(result) - named if result is not None else set()
        for each in fresh:
            program.set_source(each, replace(program.source(each), module=output.name))
        named |= fresh
    return program


def _forget(program: Program, node: fx.Node) -> None:
    """Of the first operand the op needs only shape and dtype."""
    type_, given = program.type(node), arguments(node)
    if node.target in (aten.zero.default, aten.fill.Scalar):
        value = given.get("value", 0)
        filled = program.insert(aten.full.default, (list(type_.shape), value), type_, node, {"dtype": type_.dtype})
        program.replace(node, filled)
    elif node.target in (aten.copy.default, aten.fill.Tensor):
        source: Any = given["src" if "src" in given else "value"]
        if program.type(source).shape != type_.shape:
            source = program.emit(aten.expand.default, source, list(type_.shape), like=node)
        program.replace(node, Emitter(program, node).cast(source, type_.dtype))
    else:
        node.args = (_unwritten(program, node), *node.args[1:])


def _unwritten(program: Program, node: fx.Node) -> fx.Node:
    type_ = program.type(node)
    return program.insert(unwritten, (list(type_.shape), type_.dtype), type_, node)
