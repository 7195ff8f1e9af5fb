"""Meshes to hold a promise on."""

from __future__ import annotations

import itertools
import math

from shardc import Mesh


def all_meshes(num_ranks: int = 16, num_axes: int = 3) -> list[Mesh]:
    """Every mesh of at most so many ranks and axes, each axis of two ranks or more; and that of one rank."""
    names = "abcdefgh"[:num_axes]
    shapes = itertools.chain.from_iterable(
        itertools.product(range(2, num_ranks + 1), repeat=count) for count in range(1, num_axes + 1)
    )
    fitting = [shape for shape in shapes if math.prod(shape) <= num_ranks]
    return [Mesh(a=1), *(Mesh(**dict(zip(names, shape, strict=False))) for shape in fitting)]
