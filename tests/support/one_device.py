"""Comparisons of results on a mesh with results on one device."""

from __future__ import annotations

from typing import Any

import torch
from parallel_models import whole
from torch import Tensor, nn

import shardc


def equals_one_device(compiled: shardc.Compiled, *args: Any, **kwargs: Any) -> None:
    """Assert that loss and gradients of a model in float64 equal those of one device."""
    loss, gradients = compiled.simulate(*args, **kwargs)
    expected = compiled.model(*args, **kwargs)
    parameters = dict(compiled.model.named_parameters())
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for name, gradient in zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert that float64 values differ by 1e-10 at most, relative to the largest if that is above 1."""
    assert found.shape == expected.shape, what
    error = (found - expected).abs().max() / max(1.0, expected.abs().max().item()) if expected.numel() else 0
    assert error <= 1e-10, f"{what} differs by {error:.1e}"


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    """Assert that two float64 tensors are equal up to rounding; either may be a DTensor."""
    torch.testing.assert_close(whole(mine), whole(theirs), atol=1e-12, rtol=1e-12)


def assert_same_state(parallel: nn.Module, alone: nn.Module) -> None:
    """Assert that the state dicts have the same names and the same values."""
    theirs = alone.state_dict()
    assert list(parallel.state_dict()) == list(theirs)
    for name, tensor in parallel.state_dict().items():
        assert_same(tensor, theirs[name])
