"""Ops over lists of tensors as ops of each tensor: what a fused kernel does to all at once is cut tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

OF_EACH: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp "
            "lgamma log log10 log1p log2 max mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub "
            "tan tanh trunc"
        ).split()
    },
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "addcmul": lambda x, a, b, value=1: x + value * (a * b),
    "copy": aten.copy,
    "maximum": lambda x, low: torch.clamp(x, min=low),
    "minimum": lambda x, high: torch.clamp(x, max=high),
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "zero": torch.zeros_like,
}


def foreach_ops() -> dict[Any, Callable[..., list[Tensor]]]:
    """For every op over lists that makes new ones the function that computes it tensor by tensor."""
    found: dict[Any, Callable[..., list[Tensor]]] = {}
    for name, op in OF_EACH.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet else ():
            listed = getattr(packet, overload)
            if not listed._schema.is_mutable:
                found[listed] = partial(_each, op, name.startswith("addc") and overload == "Tensor")
    return found


def _each(op: Callable[..., Tensor], has_numbers: bool, *args: Any, **kwargs: Any) -> list[Tensor]:
    """``has_numbers``: the last argument is a tensor with a number for each."""
    given = [*args[:-1], args[-1].unbind()] if has_numbers else list(args)
    count = next(len(arg) for arg in given if isinstance(arg, (list, tuple)))
    return [op(*(arg[i] if isinstance(arg, (list, tuple)) else arg for arg in given), **kwargs) for i in range(count)]
