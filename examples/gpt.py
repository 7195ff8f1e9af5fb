"""A minGPT style model in plain PyTorch, and the few annotations that spread it over a mesh.

Targets for the command line, each ``(model, args, kwargs, annotations)``::

    shardc dump examples/gpt.py:gpt --mesh dp=2,tp=2 --only collectives
    shardc verify examples/gpt.py:gpt_fsdp --mesh dp=4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardc import Mesh, P

Target = tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, P]]

# Megatron's tensor parallelism: the second weight of each pair is cut by rows of the input. The rest is inferred.
MEGATRON = {"*.attn.proj.weight": P(None, "tp"), "*.mlp.down.weight": P(None, "tp")}
DATA = {"ids": P("dp"), "targets": P("dp")}


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a GPT. ``fused``: q, k and v have one weight. ``tied``: the head is the token embedding."""

    vocab: int = 128
    context: int = 32
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.0
    fused: bool = True
    tied: bool = False


class Attention(nn.Module):
    """Causal self-attention; q, k and v from one weight or from three."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        if config.fused:
            self.qkv = nn.Linear(config.width, 3 * config.width)
        else:
            self.q = nn.Linear(config.width, config.width)
            self.k = nn.Linear(config.width, config.width)
            self.v = nn.Linear(config.width, config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, dim=-1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps token ids ``[batch, time]`` to their mean cross entropy with ``targets``; without targets, to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialize)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt(mesh: Mesh | None = None) -> Target:
    """Data parallel over dp and tensor parallel over tp, where the mesh has them; one fused weight for q, k and v."""
    return _target(Config(), plan(mesh))


def gpt_separate_qkv(mesh: Mesh | None = None) -> Target:
    """Like ``gpt``, with separate weights for q, k and v."""
    return _target(Config(fused=False), plan(mesh))


def gpt_tied(mesh: Mesh | None = None) -> Target:
    """Like ``gpt``, with the head tied to the token embedding."""
    return _target(Config(tied=True), plan(mesh))


def gpt_dropout(mesh: Mesh | None = None) -> Target:
    """Like ``gpt``, with dropout; its masks are the same on every mesh."""
    return _target(Config(dropout=0.1), plan(mesh))


def gpt_sequence(mesh: Mesh | None = None) -> Target:
    """Like ``gpt``, with Megatron's sequence parallelism: tp cuts values between attention and MLP along time."""
    batch = "dp" if mesh is None or "dp" in mesh.axis_names else None
    return _target(Config(), plan(mesh) | {"module:tokens": P(batch, "tp")})


def gpt_fsdp() -> Target:
    """FSDP: every parameter is cut on dim 0 and gathered where it is used; gradients are reduce_scattered."""
    return _target(Config(), DATA | {"param:*": P("dp")})


def plan(mesh: Mesh | None) -> dict[str, P]:
    """The annotations whose axes the mesh has; without a mesh, all of them."""
    axes = ("dp", "tp") if mesh is None else mesh.axis_names
    return (DATA if "dp" in axes else {}) | (MEGATRON if "tp" in axes else {})


def _target(config: Config, annotations: dict[str, P], batch: int = 16) -> Target:
    torch.manual_seed(0)
    ids, targets = torch.randint(config.vocab, (2, batch, config.context))
    return GPT(config), (ids, targets), {}, annotations
