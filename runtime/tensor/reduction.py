"""Reductions of cut tensors: each rank reduces its piece, and then the gathered results of all ranks.

A norm over a whole tensor is deferred: its collective runs when its value is needed, or before any other op on global
tensors. ``torch.nn.utils.clip_grad_norm_`` takes the norm of one gradient after the other; one collective serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from .piece import from_all

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of a cut tensor. ``on_piece``: reduces a piece, over dims, with or without ``keepdim``.

    ``on_rows``: reduces the results of all ranks, one row each.
    """

    on_piece: Callable[[Tensor, list[int], bool], Tensor]
    on_rows: Callable[[Tensor], Tensor]


def reduction_of(packet: Any, x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    """The reduction that an op computes of a tensor over ``dims``; None if it is none. ``named``: its arguments."""
    find = REDUCTIONS.get(packet)
    return None if find is None else find(x, named, dims)


def _sum(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction:
    dtype = named.get("dtype") or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    wide = _wide(dtype)
    return Reduction(lambda piece, over, keep: piece.sum(over, keep, dtype=wide), lambda rows: rows.sum(0).to(dtype))


def _mean(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    dtype = named.get("dtype") or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    total, count = _sum(x, {"dtype": _wide(dtype)}, dims), math.prod(x.shape[dim] for dim in dims)
    return Reduction(total.on_piece, lambda rows: (total.on_rows(rows) / count).to(dtype))


def _prod(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    if len(dims) < x.ndim or named.get("keepdim"):
        return None
    dtype = named.get("dtype") or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    wide = _wide(dtype)
    return Reduction(lambda piece, over, keep: piece.prod(dtype=wide), lambda rows: rows.prod(0).to(dtype))


def _any(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction:
    return Reduction(torch.any, lambda rows: rows.any(0))


def _all(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction:
    return Reduction(torch.all, lambda rows: rows.all(0))


def _count_nonzero(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction:
    return Reduction(lambda piece, over, keep: piece.count_nonzero(over), lambda rows: rows.sum(0))


def _max(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    if not x.numel() or x.is_complex():
        return None
    lowest = -math.inf if x.is_floating_point() else _integers(x.dtype)[0]
    return Reduction(lambda *args: _extreme(torch.amax, lowest, *args), lambda rows: rows.amax(0))


def _min(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    if not x.numel() or x.is_complex():
        return None
    highest = math.inf if x.is_floating_point() else _integers(x.dtype)[1]
    return Reduction(lambda *args: _extreme(torch.amin, highest, *args), lambda rows: rows.amin(0))


def _integers(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest and the largest number of a dtype."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _extreme(extreme: Callable[..., Tensor], empty: float, piece: Tensor, dims: list[int], keep: bool) -> Tensor:
    """The largest or the smallest elements; ``empty`` if a rank has none."""
    if piece.numel():
        return extreme(piece, dims, keep)
    sizes = [(1 if dim in dims else size) for dim, size in enumerate(piece.shape) if keep or dim not in dims]
    return piece.new_full(sizes, empty)


def _alone(find: Callable[[DTensor, Mapping[str, Any], set[int]], Reduction | None]) -> Any:
    """The reduction for the overload of an op whose only argument is the tensor."""
    return lambda x, named, dims: find(x, named, dims) if named.keys() == {"self"} else None


def _norm(x: DTensor, named: Mapping[str, Any], dims: set[int]) -> Reduction | None:
    order = named.get("ord", named.get("p"))
    order, dtype = 2.0 if order is None else float(order), named.get("dtype") or x.dtype
    if order <= 0 or not x.numel():
        return None
    wide, result = _wide(dtype), _real(dtype)

    def on_piece(piece: Tensor, over: list[int], keep: bool) -> Tensor:
        if piece.numel() or order != math.inf:
            return torch.linalg.vector_norm(piece, order, over, keep, dtype=wide)
        return piece.abs().sum(over, keep, dtype=_real(wide))  # zeros

    return Reduction(on_piece, lambda rows: torch.linalg.vector_norm(rows, order, 0).to(result))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds numbers of a dtype."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


Find = Callable[[DTensor, Mapping[str, Any], set[int]], Reduction | None]
REDUCTIONS: Mapping[Any, Find] = {
    aten.all: _all,
    aten.amax: _max,
    aten.amin: _min,
    aten.any: _any,
    aten.count_nonzero: _count_nonzero,
    aten.linalg_vector_norm: _norm,
    aten.max: _alone(_max),
    aten.mean: _mean,
    aten.min: _alone(_min),
    aten.norm: _norm,
    aten.prod: _prod,
    aten.sum: _sum,
}


class DeferredNorm(Tensor):
    """The norm of a cut tensor before its collective; any op on it runs the collectives of all deferred norms.

    ``number``: the norm of this rank's piece, later of the whole. ``order``: 2 for the Euclidean norm. ``tensor``: the
    cut tensor; None once ``number`` is the norm of the whole.
    """

    number: Tensor
    order: float
    tensor: DTensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, number: Tensor, order: float, tensor: DTensor, dtype: torch.dtype) -> Any:
        """``dtype``: that of the whole tensor's norm."""
        deferred: Any = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=number.device)
        deferred.number, deferred.order, deferred.tensor = number, order, tensor
        _waiting.append(deferred)
        return deferred

    def value(self) -> Tensor:
        """The norm of the whole tensor."""
        complete_norms()
        return self.number

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on the norm of the whole tensor."""
        args, kwargs = pytree.tree_map_only(DeferredNorm, DeferredNorm.value, (args, kwargs or {}))
        return func(*args, **kwargs)


_waiting: list[DeferredNorm] = []


def deferred_norm(x: DTensor, order: float = 2) -> DeferredNorm | None:
    """The deferred norm of a whole cut tensor; None for an order that ranks cannot combine, or an empty tensor."""
    reduction = _norm(x, {"ord": order}, set())
    if reduction is None:
        return None
    norm = reduction.on_piece(x._local_tensor, list(range(x.ndim)), False)
    return DeferredNorm(norm, float(order), x, _real(x.dtype))


def complete_norms() -> None:
    """Run the collectives of all deferred norms: one for all tensors that are cut over the same axes."""
    if not _waiting:
        return
    waiting = _waiting.copy()
    _waiting.clear()
    groups: dict[Any, list[DeferredNorm]] = {}
    for each in waiting:
        assert each.tensor is not None
        spec = each.tensor._spec
        axes = tuple(type(placement) is Replicate for placement in spec.placements)
        groups.setdefault((spec.mesh, axes, each.order, each.number.dtype, each.number.device), []).append(each)
    for group in groups.values():
        tensor = group[0].tensor
        assert tensor is not None
        rows = from_all(torch.stack([each.number for each in group]), tensor, "norm")
        norms = torch.linalg.vector_norm(rows, group[0].order, 0).unbind()
        for each, norm in zip(group, norms, strict=True):
            each.number, each.tensor = norm.to(each.dtype), None
