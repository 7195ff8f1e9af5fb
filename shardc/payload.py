"""What one rank puts into a collective and takes out: equal pieces, padding included, and the elements of others."""

from __future__ import annotations

import math
from typing import Any

from shardc.collective import Kind, Step, group_size, wire_bytes
from shardc.window import rows_sent

Fit = tuple[int, int]  # a dim, and the size that it must have


def fits(
    kind: Kind, args: tuple[Any, ...], count: int, taken: tuple[int, ...], made: tuple[int, ...]
) -> tuple[Fit | None, Fit | None]:
    """What a collective in groups of ``count`` needs of its operand, and what is to be done with its result.

    ``taken`` and ``made`` are the local shapes before and after, ``args`` those after the value. Collectives cut and
    join equal pieces: a dim that is cut unevenly is made longer before, or cut short after. None where it fits.
    """
    before: Fit | None = None
    after: Fit | None = None
    if kind in ("all_gather", "all_to_all") and made[args[1]] != count * taken[args[1]]:
        after = args[1], made[args[1]]
    if kind in ("shard_slice", "reduce_scatter", "all_to_all"):
        dim = args[1 if kind == "shard_slice" else 2]
        before = (dim, count * made[dim]) if taken[dim] != count * made[dim] else None
    return before, after


def payload_numel(kind: Kind, args: tuple[Any, ...], count: int, taken: tuple[int, ...], made: tuple[int, ...]) -> int:
    """Elements of the larger of one rank's input and output, made to fit: of equal pieces, padding included."""
    before, after = fits(kind, args, count, taken, made)
    larger, fit = (made, after and (after[0], count * taken[after[0]])) if kind == "all_gather" else (taken, before)
    sizes = list(larger)
    if fit:
        sizes[fit[0]] = fit[1]
    return math.prod(sizes)


def wire_numel(step: Step, taken: tuple[int, ...]) -> int:
    """Elements that one rank sends in a step by the ring algorithms, given the local shape before it."""
    if step.kind == "view":
        return 0
    if step.kind == "rechunk":
        return rechunked_numel(step.args, taken)[1]
    count = group_size(step.sharding.mesh, step.kind, step.args)
    made = step.sharding.local_shape(step.shape)
    return wire_bytes(step.kind, payload_numel(step.kind, step.args, count, taken, made), count)


def rechunked_numel(args: tuple[Any, ...], taken: tuple[int, ...]) -> tuple[int, int]:
    """Elements of the rank that takes or gives most in a ``rechunk``, and of the one that gives most."""
    _, dim, values, _ = args
    gives, takes = map(max, rows_sent(values))
    row = math.prod(size for i, size in enumerate(taken) if i != dim)
    return max(gives, takes) * row, gives * row
