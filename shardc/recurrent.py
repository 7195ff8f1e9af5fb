"""Recurrent layers while they are captured: ops of each step, and the dropout between layers drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

LAYERED = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@contextmanager
def plain_cells() -> Iterator[None]:
    """In the block recurrent layers are ops of each step, not one kernel for all."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@dataclass(frozen=True, slots=True)
class LayeredCall:
    """The arguments of one of torch's functions for all layers.

    ``sizes``: those of the batch at each step, where the sequences are packed; ``options``: whether there are biases,
    and after the number of layers and the dropout: whether it trains, runs two ways and has the batch first.
    """

    x: Tensor
    sizes: tuple[Tensor, ...]
    state: Tensor | Sequence[Tensor]
    weights: Sequence[Tensor]
    biased: bool
    num_layers: int
    chance: float
    options: tuple[bool, ...]

    @staticmethod
    def of(args: tuple[Any, ...]) -> LayeredCall:
        """The call ``(x, [sizes], state, weights, biased, num_layers, chance, trains, two ways, [batch first])``."""
        at = next(i for i, value in enumerate(args) if isinstance(value, bool)) - 2
        state, weights, biased, num_layers, chance, *options = args[at:]
        return LayeredCall(args[0], args[1:at], state, weights, biased, num_layers, chance, tuple(options))

    @property
    def drops(self) -> bool:
        """Whether something is dropped between layers."""
        return self.chance > 0 and self.num_layers > 1 and self.options[0]

    def by_layers(self, function: Any) -> tuple[Tensor, ...]:
        """What ``function`` returns of the call, one layer after the other, with the dropout between.

        torch's own decomposition (``_rnn_helper``) compares the layer's number the wrong way round and never drops.
        """
        x, finals = self.x, []
        for layer in range(self.num_layers):
            if layer:
                x = dropout(x, self.chance)
            x, *final = function(x, *self.sizes, self._state(layer), self._weights(layer), *self._one_layer)
            finals.append(final)
        return x, *(torch.cat(each) for each in zip(*finals, strict=True))

    @property
    def _one_layer(self) -> tuple[Any, ...]:
        return self.biased, 1, 0.0, *self.options

    def _state(self, layer: int) -> Any:
        if isinstance(self.state, Tensor):
            return self.state.chunk(self.num_layers)[layer]
        return [each.chunk(self.num_layers)[layer] for each in self.state]

    def _weights(self, layer: int) -> Sequence[Tensor]:
        num = len(self.weights) // self.num_layers
        return self.weights[layer * num : (layer + 1) * num]
