"""Random ops as draws by a counter: element by element, the same on every mesh.

A draw depends on the seed, the step, the op's module, its ordinal in the module, and the index of the element in the
whole value. So a shard draws the numbers that the whole value has there, and a call that backward repeats draws the
same ones again.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from shardc.language.errors import CaptureError
from shardc.ops.attention.tiled import TILED, TILED_BACKWARD, TILED_MASK_BACKWARD
from shardc.ops.pointwise import unwritten
from shardc.ops.random import poisson_quantile, seeded, uniform
from shardc.program.node import ancestors, arguments, is_random
from shardc.program.program import Program

from ..emitter import Emitter

aten = torch.ops.aten


def draw_random(program: Program) -> None:
    """Replace every random op."""
    ordinals: Counter[str] = Counter()
    for node in list(program.calls):
        if not is_random(node):
            continue
        module = program.source(node).module
        ordinals[module] += 1
        draw = Draw(program, node, f"{module}#{ordinals[module]}")
        with program.graph.inserting_before(node):
            if node.target is TILED:
                _attention(program, node, draw)
            elif node.target in DISTRIBUTIONS:
                result = DISTRIBUTIONS[node.target](draw)
                program.replace(node, result if isinstance(result, tuple) else draw.emit.cast(result, draw.dtype))
            else:
                _seed(program, node, draw)


def _attention(program: Program, node: fx.Node, draw: Draw) -> None:
    """Give attention with dropout, and its backward, the seed, the key and the indices that both draw the mask from."""
    q, k = (draw.given[name] for name in ("query", "key"))
    first = draw.index(draw.emit.shape(q)[:3], draw.emit.shape(k)[2])
    targets = TILED_BACKWARD, TILED_MASK_BACKWARD
    backward = {user for item in node.users for user in item.users if user.target in targets}
    for each in (node, *backward):
        given = arguments(each) | {"random": draw.random, "first": first, "draw": draw.key()}
        each.args, each.kwargs = tuple(given.values())[: len(each.args)], {}
        program.forget_rule(each)


def _seed(program: Program, node: fx.Node, draw: Draw) -> None:
    """The same op, whole on every rank, with a generator of its own."""
    unused = (torch.Generator, torch.device, torch.layout)  # tensors are made on the device that the program runs on
    given = [None if isinstance(value, unused) else value for value in arguments(node).values()]
    if any(isinstance(value, fx.Node) for entry in given if isinstance(entry, (list, tuple)) for value in entry):
        source = program.source(node)
        place = f"{node.target} in {source.module or 'the model'} ({source.location})"
        problem = "a random op of a list of tensors cannot be drawn alike on every mesh"
        raise CaptureError(place, problem, "draw for each tensor by itself, or outside of the model")
    node.args = (draw.random, draw.key(), str(node.target), *given)
    node.kwargs = {}
    node.target = seeded
    program.forget_rule(node)


# The program of initial values.


_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default}
_DRAWS = ("uniform", "exponential", "log_normal", "cauchy", "geometric", "random", "normal_functional")
_OVERWRITES = {
    *(getattr(aten, name).default for name in (*_DRAWS, "zero", "copy")),
    *(aten.random.to, aten.bernoulli.p, aten.fill.Scalar, aten.fill.Tensor),
}


def name_draws(program: Program) -> Program:
    """The program of initial values, where a draw's module is the name of the parameter that it is for."""
    program = program.edited()
    for node in list(program.calls):
        with program.graph.inserting_before(node):
            if node.target in _OVERWRITES:
                _forget(program, node)
            elif node.target in _EMPTY:
                program.replace(node, _unwritten(program, node))
    program.remove_dead()
    named: set[fx.Node] = set()
    for output, result in zip(program.outputs, program.results, strict=True):
        unnamed = ancestors(result) - named if result is not None else set()
        for node in unnamed:
            program.set_source(node, replace(program.source(node), module=output.name))
        named |= unnamed
    return program


def _forget(program: Program, node: fx.Node) -> None:
    """Drop the first operand of an op that overwrites it, which needs only its shape and dtype."""
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


# Numbers by a counter.


Drawn = fx.Node | tuple[fx.Node, ...]  # the replacement of a random op, or of each of its results
_BITS = {torch.float16: 11, torch.bfloat16: 8}  # leading bits of a number in [0, 1) that the dtype keeps
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Draw:
    """One random op. ``place``: its module and its ordinal there, which with seed and step are the key of its draws.

    ``work``: the dtype that its numbers are computed in: float32 for a float result of 32 bits or less, else float64.
    """

    def __init__(self, program: Program, node: fx.Node, place: str) -> None:
        self.program, self.emit, self.place = program, Emitter(program, node), place
        self.given = self.emit.given
        type_ = program.types(node)[0]
        assert type_ is not None
        self.shape, self.dtype = type_.shape, type_.dtype
        is_narrow = self.dtype.is_floating_point and self.dtype != torch.float64
        self.work = torch.float32 if is_narrow else torch.float64

    @property
    def random(self) -> fx.Node:
        """The program's seed and step."""
        return next(node for (kind, _), node in self.program.named_inputs.items() if kind == "random")

    def key(self, part: int = 0) -> int:
        """The place as a number of 32 bits; each ``part`` has another."""
        place = f"{self.place}/{part}" if part else self.place
        return int.from_bytes(hashlib.blake2s(place.encode(), digest_size=4).digest(), "big")

    def uniform(self, part: int = 0, shape: tuple[int, ...] | None = None) -> fx.Node:
        """Numbers in [0, 1) of the op's shape, in float32; each ``part`` draws others."""
        return self.emit(uniform, self.random, self.key(part), self.index(self.shape if shape is None else shape))

    def index(self, shape: tuple[int, ...], num_each: int = 1) -> fx.Node:
        """The index of each element of a shape, or of the first of the ``num_each`` elements at its place."""
        index = self.emit(aten.scalar_tensor.default, 0, dtype=torch.int64)
        for dim, size in enumerate(shape):
            stride = math.prod(shape[dim + 1 :]) * num_each
            along = self.emit(aten.mul.Scalar, self.emit(aten.arange.default, size), stride)
            spread = [1] * dim + [size] + [1] * (len(shape) - dim - 1)
            index = self.emit(aten.add.Tensor, index, self.emit(aten.reshape.default, along, spread))
        return index

    def uniform_in(self, dtype: torch.dtype, part: int = 0) -> fx.Node:
        """The same numbers in a dtype; a narrow one keeps their leading bits, so that no number rounds to 1."""
        if dtype.is_complex:
            real, imaginary = (self.uniform_in(_REAL[dtype], part + i) for i in range(2))
            return self.emit(aten.complex.default, real, imaginary)
        drawn = self.uniform(part)
        if dtype in _BITS:
            scale = 2.0 ** _BITS[dtype]
            drawn = self.emit(aten.floor.default, self.emit(aten.mul.Scalar, drawn, scale))
            drawn = self.emit(aten.mul.Scalar, drawn, 1 / scale)
        return self.emit.cast(drawn, dtype)

    def fine_uniform(self, shape: tuple[int, ...] | None = None) -> fx.Node:
        """Numbers in [0, 1) in float64, of 48 bits from two draws."""
        coarse, fine = (self.emit.cast(self.uniform(part, shape), torch.float64) for part in range(2))
        return self.emit(aten.add.Tensor, coarse, self.emit(aten.mul.Scalar, fine, 2.0**-24))

    def normal(self) -> fx.Node:
        """Normal numbers of the op's shape, by Box and Muller (1958); complex ones have a total variance of 1."""
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Scalar, self.log_of_rest(), -2.0))
        angle = self.emit(aten.mul.Scalar, self.uniform_in(self.work, 1), 2 * math.pi)
        real = self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, angle))
        if not self.dtype.is_complex:
            return real
        imaginary = self.emit(aten.mul.Tensor, radius, self.emit(aten.sin.default, angle))
        return self.emit(aten.mul.Scalar, self.emit(aten.complex.default, real, imaginary), math.sqrt(0.5))

    def log_of_rest(self) -> fx.Node:
        """log(1 - u), which is finite as u is below 1."""
        rest = self.emit(aten.rsub.Scalar, self.uniform_in(self.work), 1.0)
        return self.emit(aten.log.default, rest)

    def scaled(self, drawn: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """``drawn * scale + shift``, each a number or a tensor."""
        return self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, drawn, scale), shift)


# Distributions. A single result is cast to the op's dtype when it replaces the op.


_WIDE = 2**48  # the number of values of a fine uniform number


def _dropout(draw: Draw) -> Drawn:
    """The kept values, divided by the probability to be kept, and the mask of kept values."""
    keep = 1.0 - draw.given["p"] if draw.given["train"] else 1.0
    mask = draw.emit(aten.lt.Scalar, draw.uniform(), keep)
    kept = draw.emit(aten.mul.Tensor, draw.given["input"], draw.emit.cast(mask, draw.dtype))
    return draw.emit(aten.mul.Scalar, kept, 1.0 / keep if keep else 0.0), mask


def _bernoulli(draw: Draw) -> Drawn:
    chance = draw.given["p"] if "p" in draw.given else draw.given["self"]
    below = aten.lt.Tensor if isinstance(chance, fx.Node) else aten.lt.Scalar
    return draw.emit(below, draw.uniform(), chance)


def _uniform(draw: Draw) -> Drawn:
    low, high = draw.given["from"], draw.given["to"]
    return draw.scaled(draw.uniform_in(draw.dtype), high - low, low)


def _normal(draw: Draw) -> fx.Node:
    return draw.scaled(draw.normal(), draw.given.get("std", 1.0), draw.given.get("mean", 0.0))


def _exponential(draw: Draw) -> Drawn:
    """Never zero, since models take its logarithm (for the Gumbel distribution)."""
    waited = draw.emit(aten.clamp_min.default, draw.emit(aten.neg.default, draw.log_of_rest()), 2.0**-25)
    return draw.emit(aten.div.Tensor, waited, draw.given["lambd"])


def _cauchy(draw: Draw) -> Drawn:
    angle = draw.scaled(draw.uniform_in(draw.work), math.pi, -math.pi / 2)
    return draw.scaled(draw.emit(aten.tan.default, angle), draw.given["sigma"], draw.given["median"])


def _geometric(draw: Draw) -> Drawn:
    """The number of trials up to the first success, itself included."""
    chance = draw.given["p"]
    failed = draw.emit(aten.div.Tensor, draw.log_of_rest(), math.log1p(-chance) if chance < 1 else -math.inf)
    return draw.emit(aten.add.Tensor, draw.emit(aten.floor.default, failed), 1.0)


def _rrelu(draw: Draw) -> Drawn:
    """The slope of each negative element is drawn in training; the second result holds all slopes."""
    given = draw.given
    if not given["training"]:
        slope = draw.emit(aten.full.default, list(draw.shape), (given["lower"] + given["upper"]) / 2, dtype=draw.dtype)
        noise = given["noise"]
    else:
        slope = draw.scaled(draw.uniform_in(draw.dtype), given["upper"] - given["lower"], given["lower"])
        one = draw.emit(aten.scalar_tensor.default, 1.0, dtype=draw.dtype)
        slope = noise = draw.emit(aten.where.self, draw.emit(aten.le.Scalar, given["self"], 0), slope, one)
    sloped = draw.emit(aten.mul.Tensor, given["self"], slope)
    return draw.emit(aten.where.self, draw.emit(aten.le.Scalar, given["self"], 0), sloped, given["self"]), noise


def _whole_number(draw: Draw) -> Drawn:
    """Whole numbers from ``low`` up to, not including, ``high``, uniform over large ranges too.

    Without bounds they run from 0 to the largest integer of the dtype, or the largest that a float dtype counts to.
    """
    low, high = draw.given.get("low", 0), draw.given.get("high", draw.given.get("to"))
    if high is None and draw.dtype.is_floating_point:
        high = int(2 / torch.finfo(draw.dtype).eps) + 1
    elif high is None:
        high = 2 if draw.dtype == torch.bool else torch.iinfo(draw.dtype).max + 1
    count = high - low
    if count <= _WIDE:
        within = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.fine_uniform(), count))
        return draw.emit(aten.add.Tensor, within, low)
    coarse = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.fine_uniform(), count / 2**16))
    fine = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.uniform(2), 2.0**16))
    coarse, fine = (draw.emit.cast(part, torch.int64) for part in (coarse, fine))
    return draw.emit(aten.add.Tensor, draw.emit(aten.mul.Scalar, coarse, 2**16), draw.scaled(fine, 1, low))


def _randperm(draw: Draw) -> Drawn:
    """The order that sorts that many random numbers; whole, as sorting is."""
    return draw.emit.item(draw.emit(aten.sort.stable, draw.fine_uniform(), stable=True, dim=-1), 1)


def _multinomial(draw: Draw) -> Drawn:
    """Indices drawn by rows of probabilities.

    With replacement: the first index whose cumulative probability is above a uniform number, hence never one of
    probability 0. Without: the indices that come first in an exponential race.
    """
    chance, count = draw.emit.cast(draw.given["self"], torch.float64), draw.given["num_samples"]
    shape = draw.emit.shape(chance)
    if draw.given["replacement"]:
        sums = draw.emit(aten.cumsum.default, chance, -1)
        total = draw.emit(aten.slice.Tensor, sums, -1, shape[-1] - 1, shape[-1])
        point = draw.emit(aten.mul.Tensor, draw.fine_uniform(), total)
        return draw.emit(aten.searchsorted.Tensor, sums, point, right=True)
    rest = draw.emit(aten.rsub.Scalar, draw.fine_uniform(shape), 1.0)
    waited = draw.emit(aten.clamp_min.default, draw.emit(aten.neg.default, draw.emit(aten.log.default, rest)), 2.0**-50)
    arrival = draw.emit(aten.div.Tensor, waited, chance)
    return draw.emit.item(draw.emit(aten.topk.default, arrival, count, -1, False, True), 1)


def _poisson(draw: Draw) -> Drawn:
    rate = draw.emit.cast(draw.given["self"], torch.float64)
    return draw.emit(poisson_quantile, rate, draw.fine_uniform())


_Distribution = Callable[[Draw], Drawn]
_NAMES: dict[_Distribution, str] = {
    _dropout: "native_dropout.default",
    _bernoulli: "bernoulli.p bernoulli.default bernoulli.Tensor",
    lambda draw: draw.uniform_in(draw.dtype): "rand.default rand.generator rand_like.default rand_like.generator",
    _uniform: "uniform.default",
    _normal: "randn.default randn.generator randn_like.default randn_like.generator normal_functional.default "
    "normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor",
    lambda draw: draw.emit(aten.exp.default, _normal(draw)): "log_normal.default",
    _exponential: "exponential.default",
    _cauchy: "cauchy.default",
    _geometric: "geometric.default",
    _rrelu: "rrelu_with_noise_functional.default",
    _whole_number: "randint.default randint.generator randint.low randint.low_generator randint_like.default "
    "randint_like.low_dtype randint_like.generator randint_like.low_generator_dtype random.default random.to",
    _randperm: "randperm.default randperm.generator",
    _multinomial: "multinomial.default",
    _poisson: "poisson.default",
}


DISTRIBUTIONS: dict[Any, _Distribution] = {
    attrgetter(name)(aten): draw for draw, names in _NAMES.items() for name in names.split()
}
