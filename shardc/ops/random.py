"""Random numbers that depend on seed, step, key and global index alone: the same bits on every mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.rule import rule

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform(random: Tensor, key: int, index: Tensor) -> Tensor:
    """Float32 in [0, 1), 24 bits each, of ``index``'s shape.

    ``random``: int64[2], seed and step. ``key``: which draw this is. ``index``: int64, the global index of each
    element. Element ``i`` is output ``i`` of a SplitMix64 stream (Steele, Lea and Flood, 2014) whose state is seed,
    step and key, mixed one after the other. Integers wrap modulo 2**64.
    """
    seed, step = random[0], random[1]
    state = _mix(_mix(seed + _signed(_GAMMA)) + step * _signed(_GAMMA)) + _signed(key * _GAMMA)
    bits = _mix(_mix(state) + (index + 1) * _signed(_GAMMA))
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64 bits."""
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Zeros come in at the top; ``>>`` alone copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """The int64 of the same low 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63


rule(uniform, "_, ... -> ...")
