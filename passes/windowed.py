"""Ops that look at neighbours along a cut dim, taken apart: windows of the dim, work within each, and chunks joined.

A convolution over height cut in 4 needs of its neighbours the rows that its kernel reaches over::

    y: f32[2, 8, 16@tp, 16] = convolution(x, w)     # x: f32[2, 4, 16@tp, 16], 3 rows a kernel
        ->
    a: f32[2, 4, 24@tp, 16] = windows(x)            # 4 windows of 6 rows each: one row of each neighbour moves
    b: f32[8@tp, 4, 6, 16]  = a, its windows in front, as a part of the batch
    c: f32[8@tp, 8, 4, 16]  = convolution(b, w)
    y: f32[2, 8, 16@tp, 16] = c, its chunks behind one another
"""

from __future__ import annotations

from typing import Any

from .along import Windowed
from .windowed_convolution import CONVOLUTIONS
from .windowed_pool import POOLS
from .windowed_resample import RESAMPLINGS
from .windowed_scan import SCANS
from .windowed_shift import SHIFTS

WINDOWED: dict[Any, Windowed] = CONVOLUTIONS | POOLS | RESAMPLINGS | SCANS | SHIFTS
