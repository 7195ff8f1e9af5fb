"""Models for tests of the plan search: few layers, on meta, with widths as in real training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from gpt import MLP, Attention, Block, Config
from torch import Tensor, nn
from torch.nn import functional as F

Call = tuple[nn.Module, tuple[Tensor, ...]]


class Blocks(nn.Module):
    """Blocks with residual connections over ``[sample, ..., width]``, and a mean of squares as the loss."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def transformer(width: int, samples: int, positions: int, layers: int = 2) -> Call:
    """A GPT's blocks, without its vocabulary."""
    config = Config(context=positions, layers=layers, heads=width // 64, width=width, fused=False)
    return _on_meta(Block, config, samples, positions)


def attention_model() -> Call:
    """Two layers of attention."""
    return _on_meta(Attention, Config(context=512, layers=2, heads=8, width=1024, fused=False), 8, 512)


def mlp_model(positions: tuple[int, ...] = (256,)) -> Call:
    """Two layers of two products each."""
    return _on_meta(MLP, Config(layers=2, width=1024), 8 if positions else 2048, *positions)


def chain(*widths: int) -> nn.Sequential:
    """A chain of matrix products that has only weights."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairwise(widths)))


def _on_meta(block: type[nn.Module], config: Config, *shape: int) -> Call:
    with torch.device("meta"):
        return Blocks(block(config) for _ in range(config.layers)), (torch.empty(*shape, config.width),)


class Residual(nn.Module):
    """Blocks of two products over embeddings of ``ids``, ``[sample, position]``, and a mean of squares as the loss."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Recommender(nn.Module):
    """Predicts clicks from the rows ``ids`` of a large table, ``[sample, feature]``; returns the loss."""

    def __init__(self, rows: int, width: int, features: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.hidden, self.out = nn.Linear(features * width, hidden), nn.Linear(hidden, 1)

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        hidden = self.hidden(self.table(ids).flatten(1)).relu()
        return F.binary_cross_entropy_with_logits(self.out(hidden).squeeze(-1), clicks)
