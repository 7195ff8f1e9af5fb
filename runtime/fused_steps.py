"""Fused optimizer steps over DTensors that lie alike: one kernel over their pieces, with nothing to propagate.

DTensor's own dispatch makes a spec for each parameter's plain ``step`` anew, which costs as much as the kernel itself
on a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

OPS = [
    getattr(packet, overload)
    for name in ("adam", "adamw", "sgd", "adagrad")
    if (packet := getattr(torch.ops.aten, f"_fused_{name}_", None)) is not None
    for overload in packet.overloads()
    if "out" not in overload
]
ALIKE: dict[tuple[int, ...], list[Any]] = {}  # specs of lists that were seen to lie alike, by their ids
MAX_KNOWN = 64


def step_on_pieces() -> None:
    """Let the kernels that update each tensor of a list by those at its place in other lists take the pieces."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(OPS, _step))


def _step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update in place. Where parameter, gradient and state lie otherwise than each other, DTensor does it."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(each, DTensor) for each in arg)]
    if _lie_alike(lists) and not any(isinstance(v, DTensor) for v in kwargs.values()):
        op(*map(_pieces, args), **kwargs)
        return
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    del handlers[op]
    try:
        op(*args, **kwargs)
    finally:
        handlers[op] = _step


def _lie_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether what is updated together is cut alike, and nothing is a partial sum."""
    specs = [getattr(tensor, "_spec", None) for tensor in chain.from_iterable(lists)]
    key = tuple(map(id, specs))
    if key not in ALIKE:
        if not all(map(_are_alike, zip(*lists, strict=True))):
            return False
        if len(ALIKE) == MAX_KNOWN:
            ALIKE.clear()
        ALIKE[key] = specs  # which so keep their ids
    return True


def _are_alike(tensors: tuple[Tensor, ...]) -> bool:
    first: Any = getattr(tensors[0], "_spec", None)
    for tensor in tensors:
        spec = getattr(tensor, "_spec", None)
        if spec is None or spec.placements != first.placements:
            return False
        if spec.mesh is not first.mesh and spec.mesh != first.mesh:
            return False
    return not any(placement.is_partial() for placement in first.placements)


def _pieces(arg: Any) -> Any:
    if not isinstance(arg, (list, tuple)):
        return arg
    return [each._local_tensor if isinstance(each, DTensor) else each for each in arg]
