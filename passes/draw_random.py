"""Random ops as draws by a counter: what is drawn depends on seed, step, place in the model and global index alone.

``uniform(random, key, index)`` is pointwise in ``index``, which holds each element's row-major index in the whole value
and is made of one arange a dim; so any dim may be cut, and every mesh draws the same numbers. A random op that
distributions.py does not make of such numbers is run whole on every rank by a generator that is seeded alike.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from shardc.error import CaptureError
from shardc.node import arguments, is_random
from shardc.ops.random import seeded
from shardc.program import Program

from .distributions import DISTRIBUTIONS
from .draw import Draw


def draw_random(program: Program) -> None:
    """Replace every random op."""
    ordinals: Counter[str] = Counter()
    for node in list(program.calls):
        if not _draws(node):
            continue
        module = program.source(node).module
        ordinals[module] += 1
        draw = Draw(program, node, f"{module}#{ordinals[module]}")
        with program.graph.inserting_before(node):
            if node.target in DISTRIBUTIONS:
                program.replace(node, DISTRIBUTIONS[node.target](draw))
            else:
                _seed(program, node, draw)


def _draws(node: fx.Node) -> bool:
    """Whether an op draws; attention with a dropout of zero does not."""
    return is_random(node) and (not hasattr(node.target, "_schema") or bool(arguments(node).get("dropout_p", 1.0)))


def _seed(program: Program, node: fx.Node, draw: Draw) -> None:
    """The same op, whole, by a generator of its own."""
    given = [None if isinstance(value, torch.Generator) else value for value in arguments(node).values()]
    if any(isinstance(value, fx.Node) for entry in given if isinstance(entry, (list, tuple)) for value in entry):
        source = program.source(node)
        place = f"{node.target} in {source.module or 'the model'} ({source.location})"
        problem = "a random op of a list of tensors cannot be drawn alike on every mesh"
        raise CaptureError(place, problem, "draw for each tensor by itself, or outside of the model")
    node.args = (draw.random, draw.key(), str(node.target), *_plain(given))
    node.kwargs = {}
    node.target = seeded
    program.forget_rule(node)


def _plain(given: list[Any]) -> list[Any]:
    """Arguments without those that say where a tensor is made: that is where the program runs."""
    return [None if isinstance(value, (torch.device, torch.layout)) else value for value in given]
