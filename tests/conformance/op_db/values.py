"""Outputs and gradients of a sample, computed by eager torch, and their comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sample import Sample


@dataclass(frozen=True)
class Values:
    """Outputs in order, and the gradient of each tensor that has one."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def eager(sample: Sample) -> Values:
    """Values and gradients by eager torch."""
    tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sample.tensors]
    torch.manual_seed(0)
    outputs = sample.call(*(tensor * 1 if tensor.requires_grad else tensor for tensor in tensors))
    sources = {f"xs.{i}": tensor for i, tensor in enumerate(tensors) if tensor.requires_grad}
    loose = {str(i): output for i, output in enumerate(outputs) if output.requires_grad}
    if not sources or not loose:
        return Values([output.detach() for output in outputs], {})
    tangents = [tangent(i, output) for i, output in loose.items()]
    gradients = torch.autograd.grad(list(loose.values()), list(sources.values()), tangents, allow_unused=True)
    return Values([output.detach() for output in outputs], dict(zip(sources, gradients, strict=True)))


def tangent(name: str, output: Tensor) -> Tensor:
    """A fixed random gradient of an output."""
    generator = torch.Generator().manual_seed(int(name) + 1)
    return torch.rand(output.shape, generator=generator, dtype=torch.float64).add(0.5).to(output.dtype)


def difference(found: Values, expected: Values, tolerance: float) -> str:
    """A text of the values that differ by more than ``tolerance`` of the largest; empty if none does."""
    pairs = [(f"output {i}", *pair) for i, pair in enumerate(zip(found.outputs, expected.outputs, strict=True))]
    pairs += [(f"gradient of {name}", found.gradients.get(name), g) for name, g in expected.gradients.items()]
    return "; ".join(text for text in (_differs(*pair, tolerance) for pair in pairs) if text)


def _differs(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float) -> str:
    if found is None or expected is None:
        left = found if expected is None else expected
        return f"{what} is missing on one side" if left is not None and left.count_nonzero() else ""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{what} is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        count = int((found != expected).sum())
        return f"{what} differs in {count} of {found.numel()} elements" if count else ""
    finite = expected.isfinite()
    scale = max(1.0, float(expected[finite].abs().max()) if finite.any() else 1.0)
    if torch.allclose(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
        return ""
    error = (found - expected).abs()[finite]
    return f"{what} differs by {float(error.max()) if error.numel() else 0:.1e}, largest {scale:.1e}"
