"""What runs the parts of a program: the executor, or compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .deferred import Sums, Totals
from .interpreter import Values


class Runner(Protocol):
    """The parts of one program, as ``Executor`` says; what is ``saved`` is a runner's own."""

    def update(self, inputs: Sequence[Values], into: Sequence[Values] | None = None) -> list[list[Tensor | None]]: ...
    def forward(
        self, inputs: Sequence[Values], computed: Sequence[Values] | None = None
    ) -> tuple[list[list[Tensor | None]], Any]: ...
    def backward(self, saved: Any, tangents: Sequence[Values], keep: bool = False) -> list[list[Tensor | None]]: ...
    def accumulate(
        self, saved: Any, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool
    ) -> tuple[list[list[Tensor | None]], Sums]: ...
    def close(self, sums: Sums) -> list[list[Tensor | None]]: ...
    @property
    def deferred(self) -> frozenset[int]: ...
    def keeps_input(self, index: int) -> bool: ...
    def keeps_output(self, index: int) -> bool: ...
