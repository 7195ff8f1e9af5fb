"""A small model with what pipelines are bad at, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCAB = 8, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, state: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        x = state["x"]
        assert x is not None
        return {"x": x + self.dropout(torch.tanh(self.linear(self.norm(x)))), "none": None}


class Model(nn.Module):
    """Blocks that pass dicts with None in them, the first one's output once more to the last but one."""

    def __init__(self, *, dropout: float = 0.0, is_tied: bool = False, is_frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(8))
        if is_tied:
            self.head.weight = self.embed.weight
        if is_frozen:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        first = x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block({"x": x, "none": None})["x"]
            if keep is not None:
                x = x.masked_fill(~keep[:, None, None], 0.5)
            first = x if i == 0 else first
            x = x + first if i == len(self.blocks) - 2 else x
        return functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (rows, 5), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(1, 1)


def some_targets(rows: int = 8) -> tuple[Tensor, Tensor]:
    """Few targets count, and not as many in every microbatch."""
    ids, targets = data(rows)
    return ids, torch.where(torch.arange(5 * rows).reshape(rows, 5) % 7 < 3, targets, -100)


COLUMNS = {
    "skip": ({}, data()),
    "tied": ({"is_tied": True}, data()),
    "mask": ({}, (*data(), torch.arange(8) % 3 > 0)),
    "frozen": ({"is_frozen": True}, data()),
    "uneven": ({}, data(10)),
    "targets": ({}, some_targets(10)),
    "dropout": ({"dropout": 0.3}, data()),
}
