"""Random ops as draws by a counter: what is drawn depends on seed, step, place in the model and global index alone.

``uniform(random, key, index)`` is pointwise in ``index``, which holds each element's row-major index in the whole value
and is made of one arange a dim; so any dim may be cut, and every mesh draws the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

import torch
from torch import fx

from shardc.node import arguments
from shardc.ops.random import uniform
from shardc.program import Program

aten = torch.ops.aten


def draw_random(program: Program) -> None:
    """Replace every random op; raise a NotImplementedError that names the line of one that has no such form yet."""
    ordinals: Counter[str] = Counter()
    for node in list(program.calls):
        if not _is_random(node):
            continue
        if node.target not in DRAWS:
            source = program.source(node)
            raise NotImplementedError(
                f"{node.target} in {source.module or 'the model'} ({source.location}): this random op has no "
                "counter-based form yet, so its values would depend on the mesh"
            )
        module = program.source(node).module
        ordinals[module] += 1
        with program.graph.inserting_before(node):
            DRAWS[node.target](_Draw(program, node, f"{module}#{ordinals[module]}"))


def _is_random(node: fx.Node) -> bool:
    """Whether an op draws; attention with a dropout of zero does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return bool(arguments(node).get("dropout_p", 1.0))


class _Draw:
    """One random op: ``place`` is its module and its ordinal there, which with seed and step keys what it draws."""

    def __init__(self, program: Program, node: fx.Node, place: str) -> None:
        self.program, self.node, self.place = program, node, place
        type_ = program.types(node)[0]
        assert type_ is not None
        self.shape, self.dtype = type_.shape, type_.dtype

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.program.emit(op, *args, like=self.node, **kwargs)

    def uniform(self) -> fx.Node:
        """Numbers in [0, 1) of the op's shape."""
        key = int.from_bytes(hashlib.blake2s(self.place.encode(), digest_size=4).digest(), "big")
        random = next(node for (kind, _), node in self.program.named_inputs.items() if kind == "random")
        return self.emit(uniform, random, key, self._global_index())

    def convert(self, drawn: fx.Node) -> fx.Node:
        """The draw in the op's dtype."""
        is_same = self.program.type(drawn).dtype == self.dtype
        return drawn if is_same else self.emit(aten._to_copy.default, drawn, dtype=self.dtype)

    def _global_index(self) -> fx.Node:
        total = self.emit(aten.scalar_tensor.default, 0, dtype=torch.int64)
        for dim, size in enumerate(self.shape):
            stride = math.prod(self.shape[dim + 1 :])
            along = self.emit(aten.mul.Scalar, self.emit(aten.arange.default, size), stride)
            spread = [1] * dim + [size] + [1] * (len(self.shape) - dim - 1)
            total = self.emit(aten.add.Tensor, total, self.emit(aten.reshape.default, along, spread))
        return total


def _dropout(draw: _Draw) -> None:
    """The kept values over the chance to be kept, and the mask of those kept."""
    given = arguments(draw.node)
    keep = 1.0 - given["p"] if given["train"] else 1.0
    mask = draw.emit(aten.lt.Scalar, draw.uniform(), keep)
    kept = draw.emit(aten.mul.Tensor, given["input"], draw.convert(mask))
    result = draw.emit(aten.mul.Scalar, kept, 1.0 / keep if keep else 0.0)
    draw.program.replace_results(draw.node, (result, mask))


def _bernoulli(draw: _Draw) -> None:
    mask = draw.emit(aten.lt.Scalar, draw.uniform(), arguments(draw.node)["p"])
    draw.program.replace(draw.node, draw.convert(mask))


def _rand(draw: _Draw) -> None:
    draw.program.replace(draw.node, draw.convert(draw.uniform()))


DRAWS = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: _bernoulli,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
}
