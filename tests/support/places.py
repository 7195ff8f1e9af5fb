"""A custom op without a rule, in a file that is imported once: torch drops an op that is defined twice."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("targets::places", mutates_args=())
def places(x: Tensor) -> Tensor:
    """The rank of each entry within its column."""
    return x.argsort(0).argsort(0).to(x.dtype)


@places.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
