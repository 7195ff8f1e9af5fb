"""One random op as numbers of a counter: uniform and normal ones of its shape, from which distributions are made."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import fx

from shardc.ops.random import uniform
from shardc.program import Program

from .emitter import Emitter

aten = torch.ops.aten
Drawn = fx.Node | tuple[fx.Node, ...]  # what stands for a random op, or for each of its results
_BITS = {torch.float16: 11, torch.bfloat16: 8}  # leading bits of a number in [0, 1) that the dtype keeps
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Draw:
    """One random op: ``place`` is its module and its ordinal there, which with seed and step keys what it draws.

    ``work``: the dtype that its numbers are computed in, float64 unless the op is of a float of 32 bits or less.
    """

    def __init__(self, program: Program, node: fx.Node, place: str) -> None:
        self.program, self.emit, self.place = program, Emitter(program, node), place
        type_ = program.types(node)[0]
        assert type_ is not None
        self.shape, self.dtype = type_.shape, type_.dtype
        is_narrow = self.dtype.is_floating_point and self.dtype != torch.float64
        self.work = torch.float32 if is_narrow else torch.float64

    @property
    def given(self) -> dict[str, Any]:
        """The op's arguments by name."""
        return self.emit.given

    @property
    def random(self) -> fx.Node:
        """The program's seed and step."""
        return next(node for (kind, _), node in self.program.named_inputs.items() if kind == "random")

    def key(self, part: int = 0) -> int:
        """A number of the place; another ``part`` has another."""
        place = f"{self.place}/{part}" if part else self.place
        return int.from_bytes(hashlib.blake2s(place.encode(), digest_size=4).digest(), "big")

    def uniform(self, part: int = 0, shape: tuple[int, ...] | None = None) -> fx.Node:
        """Numbers in [0, 1) of the op's shape, in float32; another ``part`` draws others."""
        index = self._global_index(self.shape if shape is None else shape)
        return self.emit(uniform, self.random, self.key(part), index)

    def uniform_in(self, dtype: torch.dtype, part: int = 0) -> fx.Node:
        """The same numbers in a dtype; one of few bits keeps the leading ones, so that no number becomes 1."""
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
        """Normal numbers of the op's shape, by Box and Muller (1958); complex ones have a variance of 1 in all."""
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Scalar, self.log_of_rest(), -2.0))
        angle = self.emit(aten.mul.Scalar, self.uniform_in(self.work, 1), 2 * math.pi)
        real = self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, angle))
        if not self.dtype.is_complex:
            return real
        imaginary = self.emit(aten.mul.Tensor, radius, self.emit(aten.sin.default, angle))
        return self.emit(aten.mul.Scalar, self.emit(aten.complex.default, real, imaginary), math.sqrt(0.5))

    def log_of_rest(self) -> fx.Node:
        """log(1 - u), which is finite, as u is below 1."""
        rest = self.emit(aten.rsub.Scalar, self.uniform_in(self.work), 1.0)
        return self.emit(aten.log.default, rest)

    def scaled(self, drawn: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """``drawn * scale + shift``, each a number or a tensor."""
        return self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, drawn, scale), shift)

    def done(self, drawn: fx.Node) -> fx.Node:
        """The draw in the op's dtype."""
        return self.emit.cast(drawn, self.dtype)

    def _global_index(self, shape: tuple[int, ...]) -> fx.Node:
        total = self.emit(aten.scalar_tensor.default, 0, dtype=torch.int64)
        for dim, size in enumerate(shape):
            stride = math.prod(shape[dim + 1 :])
            along = self.emit(aten.mul.Scalar, self.emit(aten.arange.default, size), stride)
            spread = [1] * dim + [size] + [1] * (len(shape) - dim - 1)
            total = self.emit(aten.add.Tensor, total, self.emit(aten.reshape.default, along, spread))
        return total
