"""A compiled training step held against its model run eagerly, whole."""

from __future__ import annotations

from typing import Any

import torch

import shardc


def equals_one_device(compiled: shardc.Compiled, *args: Any, **kwargs: Any) -> None:
    """Loss and the gradient of every parameter, of a model in float64."""
    loss, gradients = compiled.simulate(*args, **kwargs)
    expected = compiled.model(*args, **kwargs)
    parameters = dict(compiled.model.named_parameters())
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for name, gradient in zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10)
