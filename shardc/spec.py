"""The text of a rule: an einsum over factors, read against the shapes of a call."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache

from shardc.sharding import TensorType

Dims = tuple[tuple[str, ...], ...]  # for each dim of a tensor, its factors, major first
Side = tuple[Dims | None, ...]  # of each operand, or of each result
Types = Sequence[TensorType | None]


def bind_spec(
    text: str,
    operands: Types,
    results: Types,
    given: Mapping[str, int],
    chunks: Container[str] = (),
) -> tuple[Side, Side, dict[str, int]]:
    """The factors of every operand and result, and the size of every factor; ``given`` says sizes left open.

    A dim of one of the ``chunks`` alone may have any size.

    >>> bind_spec("b k, k n -> b n", (f32[8, 4], f32[4, 6]), (f32[8, 6],), {})
    (((b,), (k,)), ((k,), (n,))), (((b,), (n,)),), {b: 8, k: 4, n: 6}
    """
    left, _, right = text.partition("->")
    tensors = (*operands, *results)
    sides = (*_parse_side(left, operands), *_parse_side(right, results))
    sizes = _factor_sizes(sides, tensors, given)
    bound = tuple(_bind_tensor(dims, tensor, sizes, chunks) for dims, tensor in zip(sides, tensors, strict=True))
    return bound[: len(operands)], bound[len(operands) :], sizes


def _parse_side(text: str, tensors: Types) -> Side:
    specs = [spec.strip() for spec in text.split(",")]
    assert len(specs) >= len(tensors), (text, tensors)
    return tuple(
        None if tensor is None or spec == "_" else _expand_leading(parse_dims(spec), len(tensor.shape))
        for spec, tensor in zip(specs, tensors, strict=False)
    )


@lru_cache(maxsize=4096)
def parse_dims(spec: str) -> Dims:
    """The factors of each dim of one tensor: ``(b t) 1 d`` is ``((b, t), (), (d,))``."""
    dims: list[tuple[str, ...]] = []
    for outside, inside in _parenthesised(spec):
        dims.extend(() if name == "1" else (name,) for name in outside.split())
        if inside is not None:
            dims.append(tuple(inside.split()))
    return tuple(dims)


def _parenthesised(spec: str) -> list[tuple[str, str | None]]:
    pieces: list[tuple[str, str | None]] = []
    while "(" in spec:
        outside, _, rest = spec.partition("(")
        inside, _, spec = rest.partition(")")
        pieces.append((outside, inside))
    return [*pieces, (spec, None)]


def _expand_leading(dims: Dims, ndim: int) -> Dims:
    """``...`` as named leading dims, counted from the right so that all tensors of a call agree.

    A tensor with fewer dims than are named besides is whole: some ops return an empty one for what was not asked for.
    """
    if ("...",) not in dims:
        return dims
    i = dims.index(("...",))
    count = ndim - (len(dims) - 1)
    if count < 0:
        return ((),) * ndim
    return (*dims[:i], *((f"...{count - k}",) for k in range(count)), *dims[i + 1 :])


def _factor_sizes(sides: Side, tensors: Types, given: Mapping[str, int]) -> dict[str, int]:
    """Sizes of factors that have a dim to themselves, then of the one factor that a dim of several leaves open."""
    pairs = [
        (factors, size)
        for dims, tensor in zip(sides, tensors, strict=True)
        if dims is not None and tensor is not None
        for factors, size in zip(dims, tensor.shape, strict=True)
    ]
    sizes: dict[str, int] = {}
    for (factor,), size in [pair for pair in pairs if len(pair[0]) == 1]:
        sizes[factor] = size if sizes.get(factor, 1) == 1 else sizes[factor]
    sizes.update(given)
    for factors, size in pairs:
        for factor in [factor for factor in factors if factor not in sizes][:1]:
            sizes[factor] = size // math.prod(sizes[other] for other in factors if other != factor)
    return sizes


def _bind_tensor(
    dims: Dims | None, tensor: TensorType | None, sizes: Mapping[str, int], chunks: Container[str]
) -> Dims | None:
    if dims is None or tensor is None:
        return None
    return tuple(_bind_dim(factors, size, sizes, chunks) for factors, size in zip(dims, tensor.shape, strict=True))


def _bind_dim(factors: tuple[str, ...], size: int, sizes: Mapping[str, int], chunks: Container[str]) -> tuple[str, ...]:
    if len(factors) == 1 and factors[0] in chunks:
        return factors
    product = math.prod(sizes[factor] for factor in factors)
    if not factors or (size == 1 and product != 1):
        return ()
    assert product == size, (factors, size, sizes)
    return factors
