"""A model of attention between projections, and a comparison of its step on one device and on virtual ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardc import Mesh, P, compile
from shardc.api import Compiled

BATCH, WIDTH = 2, 24


class Attending(nn.Module):
    """Attention of queries from ``x`` to keys from ``y``, by default from ``x``. ``num_keys``: number of key heads."""

    def __init__(self, heads: int = 4, num_keys: int = 4, is_causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.heads, self.num_keys, self.is_causal, self.scale = heads, num_keys, is_causal, scale
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH * num_keys // heads) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        seen = x if y is None else y
        q, k, v = (
            layer(of).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, of, heads in (
                (self.q, x, self.heads),
                (self.k, seen, self.num_keys),
                (self.v, seen, self.num_keys),
            )
        )
        out: Tensor = self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return (out * out).sum()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The attention output of each query."""
        has_fewer_keys = self.num_keys != self.heads
        is_causal = self.is_causal and mask is None
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=self.scale, enable_gqa=has_fewer_keys
        )


def attending() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """A target for the commands."""
    return Attending().double(), (), draw(8)


def draw(queries: int, keys: int | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random inputs with these numbers of positions."""
    generator = torch.Generator().manual_seed(queries)
    lengths = {"x": queries} if keys is None else {"x": queries, "y": keys}
    return {name: torch.randn(BATCH, length, WIDTH, generator=generator).to(dtype) for name, length in lengths.items()}


def check_step(
    model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], tolerance: float, axis: str = "cp", **options: Any
) -> Compiled:
    """Compile a step with positions cut by an axis; assert that its loss and gradients are those of one device."""
    batch = "dp" if "dp" in mesh.axis_names else None
    cut = {name: P(batch, axis) for name in inputs if name != "mask"}
    compiled = compile(model, mesh, cut | options.pop("annotations", {}), kwargs=inputs, **options)
    check_compiled(compiled, model, inputs, tolerance)
    return compiled


def check_compiled(compiled: Compiled, model: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> None:
    """Assert that the loss and the gradients of a step are those of one device."""
    loss, gradients = compiled.simulate(**inputs)
    expected = model(**inputs)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        largest = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=tolerance * largest, msg=name)


def kinds_sent(compiled: Compiled, phase: str = "forward") -> list[str]:
    """The collectives of a phase without all_reduces: the name of a ring, the kind of any other."""
    sent = (each for each in compiled.collectives if each.phase == phase and each.kind != "all_reduce")
    return [each.name.rstrip("_0123456789") if each.kind == "collective_permute" else each.kind for each in sent]
