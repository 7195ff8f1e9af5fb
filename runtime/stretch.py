"""Stretches of memory: gradients that lie each in one of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import pairwise

from torch import Tensor, preserve_format

from .interpreter import Values


def rows_apart(
    rows: Sequence[Values], tangents: Sequence[Values], alone: Container[int] = ()
) -> list[list[Tensor | None]]:
    """For each position its gradients apart; those of all microbatches of a pipeline are one row's.

    ``alone``: by index, those known to be in memory of their own.
    """
    found: dict[tuple[int, ...], list[Tensor | None]] = {}
    keys = [tuple(map(id, (*row, *given))) for row, given in zip(rows, tangents, strict=True)]
    for key, row, given in zip(keys, rows, tangents, strict=True):
        if key not in found:
            found[key] = apart(row, given, alone)
    return [found[key] for key in keys]


def apart(gradients: Values, tangents: Values, alone: Container[int] = ()) -> list[Tensor | None]:
    """Gradients each in memory of its own: torch adds to them and scales them in place."""
    others = [each for i, each in enumerate(gradients) if each is not None and i not in alone]
    if _are_apart([*others, *(each for each in tangents if each is not None)]):
        return list(gradients)
    taken: dict[int, list[tuple[int, int]]] = {}  # stretches by storage, in order: a bucket holds many gradients
    for tangent in tangents:
        if tangent is not None:
            _take(tangent, taken)
    return [
        gradient if gradient is None or _take(gradient, taken) else gradient.clone(memory_format=preserve_format)
        for gradient in gradients
    ]


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two lie in the same memory, as is seen without asking which memory it is."""
    stretches = sorted((each.data_ptr(), each.nbytes) for each in tensors if each.numel())
    is_dense = all(each.is_contiguous() for each in tensors)
    return is_dense and all(start + size <= other for (start, size), (other, _) in pairwise(stretches))


def _take(tensor: Tensor, taken: dict[int, list[tuple[int, int]]]) -> bool:
    """Note the stretch of memory that a tensor lies in, unless part of it is taken: then it is not free."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = tensor.numel() if tensor.is_contiguous() else sum((size - 1) * stride for size, stride in extents) + 1
    start = tensor.data_ptr()
    end = start + max(0, reach) * tensor.itemsize
    stretches = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
    at = bisect_left(stretches, (start, start))
    is_free = (at == 0 or stretches[at - 1][1] <= start) and (at == len(stretches) or end <= stretches[at][0])
    if is_free:
        stretches.insert(at, (start, end))
    return is_free
