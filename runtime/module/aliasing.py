"""Gradients that share memory get memory of their own: optimizers and clipping write to each in place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import pairwise

from torch import Tensor, preserve_format

from ..execute.executor import Rows
from ..execute.interpreter import Values


def separate_rows(rows: Sequence[Values], tangents: Sequence[Values], own: Container[int] = ()) -> Rows:
    """For each position its gradients in memory of their own; a row that several microbatches share is one row.

    ``own``: the indices of gradients that are known to share no memory.
    """
    pairs = {tuple(map(id, (*row, *tangent))): (row, tangent) for row, tangent in zip(rows, tangents, strict=True)}
    results = {key: _separate(row, tangent, own) for key, (row, tangent) in pairs.items()}
    return [results[tuple(map(id, (*row, *tangent)))] for row, tangent in zip(rows, tangents, strict=True)]


def _separate(gradients: Values, tangents: Values, own: Container[int] = ()) -> list[Tensor | None]:
    """The gradients, with copies of those that share memory with a tangent or with a gradient before them."""
    others = [each for i, each in enumerate(gradients) if each is not None and i not in own]
    others += [each for each in tangents if each is not None]
    ranges = sorted((each.data_ptr(), each.nbytes) for each in others if each.numel())
    is_dense = all(each.is_contiguous() for each in others)
    if is_dense and all(start + size <= other for (start, size), (other, _) in pairwise(ranges)):
        return list(gradients)  # the usual case, which is quick to see
    used: dict[int, list[tuple[int, int]]] = {}  # by storage, address ranges in order: a bucket holds many gradients
    for tangent in tangents:
        if tangent is not None:
            _reserve(tangent, used)
    return [
        gradient if gradient is None or _reserve(gradient, used) else gradient.clone(memory_format=preserve_format)
        for gradient in gradients
    ]


def _reserve(tensor: Tensor, used: dict[int, list[tuple[int, int]]]) -> bool:
    """Note the address range of a tensor; False if part of it is used already."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = tensor.numel() if tensor.is_contiguous() else sum((size - 1) * stride for size, stride in extents) + 1
    start = tensor.data_ptr()
    end = start + max(0, reach) * tensor.itemsize
    ranges = used.setdefault(tensor.untyped_storage().data_ptr(), [])
    at = bisect_left(ranges, (start, start))
    is_free = (at == 0 or ranges[at - 1][1] <= start) and (at == len(ranges) or end <= ranges[at][0])
    if is_free:
        ranges.insert(at, (start, end))
    return is_free
