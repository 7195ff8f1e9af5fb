"""Zigzag: an order of positions in which each of several ranks has an early and a late stretch of them.

In causal attention later positions see more. Where a rank has one run of positions, the last rank does almost twice its
share; with 2 * count stretches, of which rank i has the i-th from either end, each rank does the same::

    8 positions, 2 ranks     in order   0 1 2 3 | 4 5 6 7
                             zigzag     0 1 6 7 | 2 3 4 5
"""

from __future__ import annotations

from shardc.language.sharding import ceil_div

ZIGZAG = "zigzag"  # after the name of an axis: P("dp", "cp:zigzag")


def stretches(length: int, count: int, index: int) -> tuple[range, range]:
    """The early and the late stretch that a rank has; as many positions as torch.chunk gives it."""
    chunk = ceil_div(length, count)
    own = max(0, min(chunk, length - index * chunk))
    early, late = index * ceil_div(chunk, 2), length - index * (chunk // 2)
    return range(early, early + ceil_div(own, 2)), range(late - own // 2, late)


def in_zigzag(length: int, count: int) -> list[range]:
    """The stretches of all ranks, one after the other."""
    return [stretch for index in range(count) for stretch in stretches(length, count, index) if stretch]
