"""What each random op draws, made of uniform numbers of a counter, element by element wherever it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardc.ops.random import poisson_quantile

from .draw import Draw, Drawn

aten = torch.ops.aten
_WIDE = 2**48  # more whole numbers than a fine uniform number tells apart


def _dropout(draw: Draw) -> Drawn:
    """The kept values over the chance to be kept, and the mask of those kept."""
    keep = 1.0 - draw.given["p"] if draw.given["train"] else 1.0
    mask = draw.emit(aten.lt.Scalar, draw.uniform(), keep)
    kept = draw.emit(aten.mul.Tensor, draw.given["input"], draw.done(mask))
    return draw.emit(aten.mul.Scalar, kept, 1.0 / keep if keep else 0.0), mask


def _bernoulli(draw: Draw) -> Drawn:
    chance = draw.given["p"] if "p" in draw.given else draw.given["self"]
    below = aten.lt.Tensor if isinstance(chance, fx.Node) else aten.lt.Scalar
    return draw.done(draw.emit(below, draw.uniform(), chance))


def _rand(draw: Draw) -> Drawn:
    return draw.uniform_in(draw.dtype)


def _uniform(draw: Draw) -> Drawn:
    low, high = draw.given["from"], draw.given["to"]
    return draw.scaled(draw.uniform_in(draw.dtype), high - low, low)


def _normal(draw: Draw) -> Drawn:
    return draw.done(draw.scaled(draw.normal(), draw.given.get("std", 1.0), draw.given.get("mean", 0.0)))


def _log_normal(draw: Draw) -> Drawn:
    exponent = draw.scaled(draw.normal(), draw.given["std"], draw.given["mean"])
    return draw.done(draw.emit(aten.exp.default, exponent))


def _exponential(draw: Draw) -> Drawn:
    """Never zero, as its logarithm is taken (the Gumbel distribution)."""
    waited = draw.emit(aten.clamp_min.default, draw.emit(aten.neg.default, draw.log_of_rest()), 2.0**-25)
    return draw.done(draw.emit(aten.div.Tensor, waited, draw.given["lambd"]))


def _cauchy(draw: Draw) -> Drawn:
    angle = draw.scaled(draw.uniform_in(draw.work), math.pi, -math.pi / 2)
    return draw.done(draw.scaled(draw.emit(aten.tan.default, angle), draw.given["sigma"], draw.given["median"]))


def _geometric(draw: Draw) -> Drawn:
    """How many trials until one succeeds, itself included."""
    chance = draw.given["p"]
    failed = draw.emit(aten.div.Tensor, draw.log_of_rest(), math.log1p(-chance) if chance < 1 else -math.inf)
    return draw.done(draw.emit(aten.add.Tensor, draw.emit(aten.floor.default, failed), 1.0))


def _rrelu(draw: Draw) -> Drawn:
    """The slope of every negative element is drawn; the second result holds all slopes."""
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


def _randint(draw: Draw) -> Drawn:
    return _whole_number(draw, draw.given.get("low", 0), draw.given["high"])


def _random(draw: Draw) -> Drawn:
    """From 0 up to the largest that a whole number has, or that a float counts to."""
    is_float = draw.dtype.is_floating_point
    default = int(2 / torch.finfo(draw.dtype).eps) if is_float else _largest(draw.dtype)
    return _whole_number(draw, 0, draw.given.get("to", default + 1))


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _whole_number(draw: Draw, low: int, high: int) -> Drawn:
    """Whole numbers from ``low`` up to, not including, ``high``: even over large ranges too."""
    count = high - low
    if count <= _WIDE:
        within = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.fine_uniform(), count))
        return draw.done(draw.emit(aten.add.Tensor, within, low))
    coarse = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.fine_uniform(), count / 2**16))
    fine = draw.emit(aten.floor.default, draw.emit(aten.mul.Scalar, draw.uniform(2), 2.0**16))
    coarse, fine = (draw.emit.cast(part, torch.int64) for part in (coarse, fine))
    return draw.done(draw.emit(aten.add.Tensor, draw.emit(aten.mul.Scalar, coarse, 2**16), draw.scaled(fine, 1, low)))


def _randperm(draw: Draw) -> Drawn:
    """The order of as many numbers; whole, as sorting is."""
    numbers = draw.fine_uniform()
    order = draw.emit.item(draw.emit(aten.sort.stable, numbers, stable=True, dim=-1), 1)
    return draw.done(order)


def _multinomial(draw: Draw) -> Drawn:
    """Rows of chances to indices drawn by them: without replacement those that come first in an exponential race."""
    chance, count = draw.emit.cast(draw.given["self"], torch.float64), draw.given["num_samples"]
    if draw.given["replacement"]:
        return _by_sums(draw, chance)
    rest = draw.emit(aten.rsub.Scalar, draw.fine_uniform(draw.program.type(chance).shape), 1.0)
    waited = draw.emit(aten.clamp_min.default, draw.emit(aten.neg.default, draw.emit(aten.log.default, rest)), 2.0**-50)
    arrival = draw.emit(aten.div.Tensor, waited, chance)
    return draw.emit.item(draw.emit(aten.topk.default, arrival, count, -1, False, True), 1)


def _by_sums(draw: Draw, chance: fx.Node) -> fx.Node:
    """The first index whose cumulated chance is above a uniform number; one of no chance never is."""
    sums = draw.emit(aten.cumsum.default, chance, -1)
    last = draw.program.type(chance).shape[-1] - 1
    total = draw.emit(aten.slice.Tensor, sums, -1, last, last + 1)
    point = draw.emit(aten.mul.Tensor, draw.fine_uniform(), total)
    return draw.emit(aten.searchsorted.Tensor, sums, point, right=True)


def _poisson(draw: Draw) -> Drawn:
    rate = draw.emit.cast(draw.given["self"], torch.float64)
    return draw.done(draw.emit(poisson_quantile, rate, draw.fine_uniform()))


_Distribution = Callable[[Draw], Drawn]
_NORMALS = ("normal_functional.default", "normal.float_float", "normal.Tensor_float", "normal.float_Tensor")
_NAMES: dict[_Distribution, tuple[str, ...]] = {
    _dropout: ("native_dropout.default",),
    _bernoulli: ("bernoulli.p", "bernoulli.default", "bernoulli.Tensor"),
    _rand: ("rand.default", "rand.generator", "rand_like.default", "rand_like.generator"),
    _uniform: ("uniform.default",),
    _normal: (
        *("randn.default", "randn.generator", "randn_like.default", "randn_like.generator"),
        *_NORMALS,
        "normal.Tensor_Tensor",
    ),
    _log_normal: ("log_normal.default",),
    _exponential: ("exponential.default",),
    _cauchy: ("cauchy.default",),
    _geometric: ("geometric.default",),
    _rrelu: ("rrelu_with_noise_functional.default",),
    _randint: (
        *("randint.default", "randint.generator", "randint.low", "randint.low_generator"),
        *("randint_like.default", "randint_like.low_dtype"),
        *("randint_like.generator", "randint_like.low_generator_dtype"),
    ),
    _random: ("random.default", "random.to"),
    _randperm: ("randperm.default", "randperm.generator"),
    _multinomial: ("multinomial.default",),
    _poisson: ("poisson.default",),
}


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


DISTRIBUTIONS: dict[Any, _Distribution] = {_op(name): draw for draw, names in _NAMES.items() for name in names}
