"""Pooling: all but places is free, and of places chunks need their neighbours' edges."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardc.ops.window import places
from shardc.rule import Call, Rule, make_rule, rule

aten = torch.ops.aten


def over_places(sides: str, count: int, linear: str) -> Callable[[Call], Rule]:
    """``"y x -> x"``: tensors of the places before, x, and after, y: the last ``count`` dims."""

    def bind(call: Call) -> Rule:
        names = sides.replace("->", "").split()
        tensors = dict(zip(names, (*call.operands, *call.results), strict=True))
        x, y = tensors["x"], tensors["y"]
        assert x is not None and y is not None
        spec, chunks = places(x, y, count)
        left, right = (", ".join([f"... {spec}"] * len(side.split())) for side in sides.split("->"))
        return make_rule(f"{left} -> {right}", call, linear=linear, chunks=chunks)

    return bind


def _enter(name: str, sides: str, count: int, linear: str = "0") -> None:
    rule(getattr(aten, name).default, over_places(sides, count, linear))


_enter("max_pool2d_with_indices", "x -> y y", 2, linear="")
_enter("max_pool3d_with_indices", "x -> y y", 3, linear="")
_enter("max_pool2d_with_indices_backward", "y x y -> x", 2)
_enter("max_pool3d_with_indices_backward", "y x y -> x", 3)
_enter("avg_pool2d", "x -> y", 2)
_enter("avg_pool3d", "x -> y", 3)
_enter("avg_pool2d_backward", "y x -> x", 2)
_enter("avg_pool3d_backward", "y x -> x", 3)
_enter("_adaptive_avg_pool2d", "x -> y", 2)
_enter("_adaptive_avg_pool2d_backward", "y x -> x", 2)
