"""Error feedback: the residuals that codes leave out of gradients, kept for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardc.language.sharding import Sharding, TensorType

Source = Callable[[Tensor], None]  # adds a part of a saved residual to a tensor


class Residuals:
    """The residuals of a module's gradients, which all of its programs read and write.

    A residual is ``[ranks, *shape]``: one slice for each rank; only their sum matters. State: ``tensors``, by name,
    then by the type and sharding that a program asked for; ``sources``, by name, of residuals that were loaded before
    a program asked for them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, dict[tuple[TensorType, Sharding], Tensor]] = {}
        self.sources: dict[str, Sequence[Source]] = {}

    def tensor(self, name: str, type_: TensorType, sharding: Sharding, zeros: Callable[[], Tensor]) -> Tensor:
        """The residual of a gradient in the type and sharding of a program: loaded values, or zeros."""
        variants = self.tensors.setdefault(name, {})
        if (type_, sharding) not in variants:
            variants[type_, sharding] = zeros()
            self._fill(name, variants[type_, sharding])
        return variants[type_, sharding]

    def by_name(self) -> dict[str, list[Tensor]]:
        """All residuals in use, by name; without those that were loaded and that no program has asked for yet."""
        return {name: list(variants.values()) for name, variants in self.tensors.items()}

    @torch.no_grad()
    def load(self, sources: Mapping[str, Sequence[Source]]) -> None:
        """Replace the residuals by saved ones."""
        self.sources = dict(sources)
        for name, tensors in self.by_name().items():
            for tensor in tensors:
                tensor.zero_()
                self._fill(name, tensor)

    def _fill(self, name: str, tensor: Tensor) -> None:
        for source in self.sources.pop(name, ()):
            source(tensor)

    def copied(self) -> Residuals:
        """The residuals of a copy of the module: clones."""
        twin = Residuals()
        twin.sources = dict(self.sources)
        twin.tensors = {
            name: {key: tensor.clone() for key, tensor in variants.items()} for name, variants in self.tensors.items()
        }
        return twin
