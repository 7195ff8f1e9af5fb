"""Random ops as draws by a counter: what is drawn depends on seed, step, place in the model and global index alone.

``uniform(random, key, index)`` is pointwise in ``index``, which holds each element's row-major index in the whole value
and is made of one arange a dim; so any dim may be cut, and every mesh draws the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
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
            _substitute(program, node, DRAWS[node.target](_Draw(program, node, f"{module}#{ordinals[module]}")))


def _substitute(program: Program, node: fx.Node, drawn: fx.Node | tuple[fx.Node, fx.Node]) -> None:
    if isinstance(drawn, tuple):
        program.replace_results(node, drawn)
    else:
        program.replace(node, drawn)


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

    def uniform(self, part: int = 0) -> fx.Node:
        """Numbers in [0, 1) of the op's shape, in float32; another ``part`` draws others."""
        place = f"{self.place}/{part}" if part else self.place
        key = int.from_bytes(hashlib.blake2s(place.encode(), digest_size=4).digest(), "big")
        random = next(node for (kind, _), node in self.program.named_inputs.items() if kind == "random")
        return self.emit(uniform, random, key, self._global_index())

    def uniform_in(self, dtype: torch.dtype, part: int = 0) -> fx.Node:
        """The same numbers in a dtype."""
        return self.convert(self.uniform(part), dtype)

    def normal(self) -> fx.Node:
        """Normal numbers of the op's shape and dtype, by Box and Muller (1958)."""
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Scalar, self.log_of_rest(), -2.0))
        angle = self.emit(aten.mul.Scalar, self.uniform_in(self.dtype, 1), 2 * math.pi)
        return self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, angle))

    def log_of_rest(self) -> fx.Node:
        """log(1 - u), which is finite, as u is below 1."""
        rest = self.emit(aten.rsub.Scalar, self.uniform_in(self.dtype), 1.0)
        return self.emit(aten.log.default, rest)

    def convert(self, drawn: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The draw in a dtype."""
        is_same = self.program.type(drawn).dtype == dtype
        return drawn if is_same else self.emit(aten._to_copy.default, drawn, dtype=dtype)

    def scaled(self, drawn: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """``drawn * scale + shift``, each a number or a tensor."""
        return self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, drawn, scale), shift)

    def _global_index(self) -> fx.Node:
        total = self.emit(aten.scalar_tensor.default, 0, dtype=torch.int64)
        for dim, size in enumerate(self.shape):
            stride = math.prod(self.shape[dim + 1 :])
            along = self.emit(aten.mul.Scalar, self.emit(aten.arange.default, size), stride)
            spread = [1] * dim + [size] + [1] * (len(self.shape) - dim - 1)
            total = self.emit(aten.add.Tensor, total, self.emit(aten.reshape.default, along, spread))
        return total


def _dropout(draw: _Draw) -> fx.Node | tuple[fx.Node, fx.Node]:
    """The kept values over the chance to be kept, and the mask of those kept."""
    given = arguments(draw.node)
    keep = 1.0 - given["p"] if given["train"] else 1.0
    mask = draw.emit(aten.lt.Scalar, draw.uniform(), keep)
    kept = draw.emit(aten.mul.Tensor, given["input"], draw.convert(mask, draw.dtype))
    return draw.emit(aten.mul.Scalar, kept, 1.0 / keep if keep else 0.0), mask


def _bernoulli(draw: _Draw) -> fx.Node:
    given = arguments(draw.node)
    chance = given["p"] if "p" in given else given["self"]
    below = aten.lt.Tensor if isinstance(chance, fx.Node) else aten.lt.Scalar
    return draw.convert(draw.emit(below, draw.uniform(), chance), draw.dtype)


def _rand(draw: _Draw) -> fx.Node:
    return draw.uniform_in(draw.dtype)


def _uniform(draw: _Draw) -> fx.Node:
    given = arguments(draw.node)
    return draw.scaled(draw.uniform_in(draw.dtype), given["to"] - given["from"], given["from"])


def _normal(draw: _Draw) -> fx.Node:
    given = arguments(draw.node)
    return draw.scaled(draw.normal(), given.get("std", 1.0), given.get("mean", 0.0))


def _exponential(draw: _Draw) -> fx.Node:
    return draw.emit(aten.div.Tensor, draw.log_of_rest(), -arguments(draw.node)["lambd"])


def _randint(draw: _Draw) -> fx.Node:
    """Whole numbers from two draws, 48 bits, so that large ranges are even too."""
    given = arguments(draw.node)
    low, high = given.get("low", 0), given["high"]
    fine = draw.emit(aten.mul.Scalar, draw.uniform_in(torch.float64, 1), 2.0**-24)
    drawn = draw.emit(aten.add.Tensor, draw.uniform_in(torch.float64), fine)
    within = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, drawn, high - low))
    return draw.convert(draw.emit(aten.add.Tensor, within, low), draw.dtype)


Draw = Callable[[_Draw], "fx.Node | tuple[fx.Node, fx.Node]"]
NORMALS = (
    aten.randn.default,
    aten.randn_like.default,
    aten.normal_functional.default,
    aten.normal.float_float,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
)
DRAWS: dict[Any, Draw] = {
    aten.native_dropout.default: _dropout,
    **dict.fromkeys((aten.bernoulli.p, aten.bernoulli.default, aten.bernoulli.Tensor), _bernoulli),
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), _rand),
    aten.uniform.default: _uniform,
    **dict.fromkeys(NORMALS, _normal),
    aten.exponential.default: _exponential,
    **dict.fromkeys((aten.randint.default, aten.randint.low), _randint),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _randint),
}
