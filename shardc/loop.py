"""Loops over traced bodies, run step by step; the backward takes the steps again, and goes back over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.body import TracedBody

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class While:
    """``while test(state, rest): state = step(state, rest)``; ``size`` tensors are the state, of ``num_given``."""

    test: TracedBody
    step: TracedBody
    size: int
    num_given: int

    def forward(self, *given: Tensor) -> Tensors:
        """The state at the end."""
        return deque(self._states(given), maxlen=1)[0]

    def backward(self, *given: Tensor) -> Tensors:
        """Of the operands and the gradients of the state's floating tensors: those of the floating operands."""
        operands, tangents = given[: self.num_given], given[self.num_given :]
        rest = operands[self.size :]
        sums = _zeros(rest)
        for state in reversed(list(self._states(operands))[:-1]):
            found = self.step.vjp([*state, *rest, *tangents])
            sums = _added(sums, found[len(tangents) :])
            tangents = tuple(found[: len(tangents)])
        return [*tangents, *sums]

    def _states(self, given: Tensors) -> Iterator[Tensors]:
        state, rest = given[: self.size], given[self.size :]
        yield state
        while self.test.forward([*state, *rest])[0]:
            state = self.step.forward([*state, *rest])
            yield state


@dataclass(frozen=True, slots=True)
class Scan:
    """``carry, row_out = step(carry, row, rest)`` for every row: ``size`` carries, then ``num_xs`` columns of rows."""

    step: TracedBody
    size: int
    num_xs: int
    num_given: int

    def forward(self, *given: Tensor) -> Tensors:
        """The last carry, and the rows that came out, stacked."""
        found = [made for _, made in self._steps(given)]
        outputs = zip(*(made[self.size :] for made in found), strict=True)
        return [*found[-1][: self.size], *(torch.stack(column) for column in outputs)]

    def backward(self, *given: Tensor) -> Tensors:
        """Of the operands and the gradients of all floating results: those of the floating operands."""
        carry, columns, rest = self._parts(given)
        num_carry, num_rows = len(_zeros(carry)), len(_zeros(columns))
        tangents, outputs = given[self.num_given :][:num_carry], given[self.num_given :][num_carry:]
        sums, rows = _zeros(rest), list[Tensors]()
        for i, (operands, _) in reversed(list(enumerate(self._steps(given)))):
            found = tuple(self.step.vjp([*operands, *tangents, *(column[i] for column in outputs)]))
            tangents, parts = found[:num_carry], found[num_carry + num_rows :]
            rows.append(found[num_carry : num_carry + num_rows])
            sums = _added(sums, parts)
        return [*tangents, *(torch.stack(column) for column in zip(*reversed(rows), strict=True)), *sums]

    def _parts(self, given: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        end = self.size + self.num_xs
        return given[: self.size], given[self.size : end], given[end : self.num_given]

    def _steps(self, given: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
        """What each step is given, and what it returns."""
        carry, columns, rest = self._parts(given)
        for i in range(len(columns[0])):
            operands = [*carry, *(column[i] for column in columns), *rest]
            found = self.step.forward(operands)
            yield operands, found
            carry = found[: self.size]


def _zeros(tensors: Tensors) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors if tensor.is_floating_point()]


def _added(sums: Tensors, parts: Tensors) -> list[Tensor]:
    return [total + part for total, part in zip(sums, parts, strict=True)]
