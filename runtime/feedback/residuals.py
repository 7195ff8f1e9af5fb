"""What codes leave out of gradients, from one step to the next (error feedback)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardc.language.sharding import Sharding, TensorType

Source = Callable[[Tensor], None]  # adds what was saved of a residual to a tensor


class Residuals:
    """The residuals of a module's gradients, which all of its programs read and write.

    A residual is ``[ranks, *shape]``, of which each rank has its own; what counts is their sum. State: ``tensors``, by
    name those of each sharding that a program asked for; ``sources``, of those that were loaded before one did.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, dict[tuple[TensorType, Sharding], Tensor]] = {}
        self.sources: dict[str, Sequence[Source]] = {}

    def tensor(self, name: str, type_: TensorType, sharding: Sharding, zeros: Callable[[], Tensor]) -> Tensor:
        """The residual of a gradient as a program reads it: zeros, but for what was loaded."""
        variants = self.tensors.setdefault(name, {})
        if (type_, sharding) not in variants:
            variants[type_, sharding] = zeros()
            self._fill(name, variants[type_, sharding])
        return variants[type_, sharding]

    def by_name(self) -> dict[str, list[Tensor]]:
        """All that there are. Those that were loaded and not asked for yet are not among them."""
        return {name: list(variants.values()) for name, variants in self.tensors.items()}

    @torch.no_grad()
    def load(self, sources: Mapping[str, Sequence[Source]]) -> None:
        """Take what was saved in place of what is here."""
        self.sources = dict(sources)
        for name, tensors in self.by_name().items():
            for tensor in tensors:
                tensor.zero_()
                self._fill(name, tensor)

    def _fill(self, name: str, tensor: Tensor) -> None:
        for source in self.sources.pop(name, ()):
            source(tensor)

    def copied(self) -> Residuals:
        """Residuals of its own for a copy of the module."""
        twin = Residuals()
        twin.sources = dict(self.sources)
        twin.tensors = {
            name: {key: tensor.clone() for key, tensor in variants.items()} for name, variants in self.tensors.items()
        }
        return twin
