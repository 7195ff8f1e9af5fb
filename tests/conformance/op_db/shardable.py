"""Finds the dims of an op's tensors that can be cut, by trying and without any rule.

A *cut* names a dim for some of the tensors. An op allows a cut if its results on the two halves, concatenated or added,
equal its results on the whole tensors.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .sample import Sample, halves

Cut = tuple[int | None, ...]  # for each tensor the dim that is cut, or None
NOT_ADDED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
_MAX_PARTNERS = 48  # ways to cut the other tensors, for one dim


def allowed_cuts(sample: Sample, most: int) -> list[Cut]:
    """Up to ``most`` cuts, at most one for each dim of each tensor; empty if the op ends the process.

    Some kernels do not check their arguments, so cuts are tried in a child process.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(_allowed_cuts(sample, most)))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return []
    finally:
        child.join()


def _allowed_cuts(sample: Sample, most: int) -> list[Cut]:
    tensors = [tensor.detach() for tensor in sample.tensors]
    whole = _run(sample, tensors)
    found: list[Cut] = []
    if whole is None or not whole:
        return found
    for place, candidates in _candidates(tensors):
        if any(cut[place[0]] == place[1] for cut in found):
            continue
        found += itertools.islice((cut for cut in candidates if _is_allowed(sample, tensors, cut, whole)), 1)
        if len(found) >= most:
            break
    return found


def _candidates(tensors: Sequence[Tensor]) -> Iterator[tuple[tuple[int, int], Iterator[Cut]]]:
    """The cuts to try for each dim of each tensor, those that cut more tensors first."""
    for t, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                yield (t, dim), _partners(tensors, t, dim, size)


def _partners(tensors: Sequence[Tensor], t: int, dim: int, size: int) -> Iterator[Cut]:
    """Cuts in which every other tensor is whole or cut along a dim of the same size."""
    choices = [
        [dim] if i == t else [*(d for d, n in enumerate(other.shape) if n == size), None]
        for i, other in enumerate(tensors)
    ]
    aligned = tuple(
        dim - tensor.ndim if i == t else _aligned(other, dim - tensor.ndim, size)
        for tensor in [tensors[t]]
        for i, other in enumerate(tensors)
    )
    first = tuple(None if place is None else place + other.ndim for place, other in zip(aligned, tensors, strict=True))
    same = tuple(dim if other.ndim > dim and other.shape[dim] == size else None for other in tensors)
    return iter(dict.fromkeys([first, same, *itertools.islice(itertools.product(*choices), _MAX_PARTNERS)]))


def _aligned(tensor: Tensor, from_right: int, size: int) -> int | None:
    """The same dim, counted from the right, if the tensor has this size there; else None."""
    return from_right if tensor.ndim >= -from_right and tensor.shape[from_right] == size else None


def _is_allowed(sample: Sample, tensors: Sequence[Tensor], cut: Cut, whole: Sequence[Tensor]) -> bool:
    pieces = [[t, t] if dim is None else halves(t, dim) for t, dim in zip(tensors, cut, strict=True)]
    parts = [_run(sample, half) for half in zip(*pieces, strict=True)]
    if any(part is None or len(part) != len(whole) for part in parts):
        return False
    joined = [_is_joined(a, b, of) for a, b, of in zip(*parts, whole, strict=True)]  # type: ignore[arg-type]
    return all(joined) and any(entry != "same" for entry in joined)


def _is_joined(a: Tensor, b: Tensor, whole: Tensor) -> str:
    """How two halves make the whole: "end to end", "added", or "same" if each equals it; empty if they do not."""
    for dim in range(whole.ndim):
        if a.ndim == b.ndim == whole.ndim and a.shape[dim] + b.shape[dim] == whole.shape[dim] and a.shape[dim]:
            rest = all(a.shape[d] == b.shape[d] == whole.shape[d] for d in range(whole.ndim) if d != dim)
            if rest and a.dtype == whole.dtype and _equal(torch.cat([a, b], dim), whole):
                return "end to end"
    if a.shape != whole.shape or b.shape != whole.shape:
        return ""
    if _equal(a, whole) and _equal(b, whole):
        return "same"
    if whole.dtype in NOT_ADDED or not (whole != 0).any():
        return ""
    return "added" if _equal(a + b, whole) else ""


def _equal(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _run(sample: Sample, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return sample.call(*(tensor.clone() for tensor in tensors))
    except Exception:  # the op does not accept these halves, whatever the error
        return None
