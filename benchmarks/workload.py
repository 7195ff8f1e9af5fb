"""What every row of the benchmark trains: the sizes, the model and the batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpt import GPT, Config
from moe import MoE
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """A model's sizes and the rows of a global batch."""

    config: Config
    batch: int = 8

    def shorter(self, parts: int) -> Size:
        """Of so many, each with all rows and a part of their tokens: together they are a batch as large."""
        return replace(self, config=replace(self.config, context=self.config.context // parts))


SIZES = {
    "tiny": Size(Config(vocab=256, context=64, layers=2, heads=4, width=64, fused=False)),
    "small": Size(Config(vocab=4096, context=256, layers=4, heads=4, width=256, fused=False)),  # 5.3 M parameters
    "medium": Size(Config(vocab=8192, context=256, layers=8, heads=8, width=512, fused=False)),  # 34 M
}
NUM_BATCHES = 4
NUM_EXPERTS = 8
PIPED = 8  # microbatches that a pipeline cuts a batch in: a row each


def new_model(size: Size, has_experts: bool = False) -> nn.Module:
    """A GPT with the same weights whenever it is called; ``has_experts``: every other block has them, as in GShard."""
    torch.manual_seed(0)
    model = GPT(size.config)
    for block in list(model.blocks)[1::2] if has_experts else ():
        block.mlp = MoE(size.config.width, 4 * size.config.width, NUM_EXPERTS, capacity_factor=1.0)
    return model


def batches(size: Size, device: str = "cpu", microbatches: int = 1) -> list[Tensor]:
    """Global batches, used in turn: ids and targets, ``[microbatch, 2, row, token]``."""
    random = torch.Generator().manual_seed(1)
    shape = (microbatches, 2, size.batch, size.config.context)
    return [torch.randint(size.config.vocab, shape, generator=random).to(device) for _ in range(NUM_BATCHES)]
