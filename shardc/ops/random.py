"""Random numbers that depend on seed, step, key and global index alone: the same bits on every mesh.

A generator's own counter (Philox, as CUDA has it) follows the order of threads, which a mesh changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.language.rule import rule

_GAMMA = 0x9E3779B97F4A7C15
_MIX_32 = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform(random: Tensor, key: int, index: Tensor) -> Tensor:
    """Float32 in [0, 1), 24 bits each, of ``index``'s shape.

    ``random``: int64[2], seed and step. ``key``: the number of the draw. ``index``: int64, the global index of each
    element.
    """
    if index.is_meta:
        return torch.empty_like(index, dtype=torch.float32)
    return uniform_of(stream(random, key), index)


def uniform_of(state: Tensor, index: Tensor) -> Tensor:
    """The numbers of a stream at these indices.

    ``state + i * gamma`` is a Weyl sequence of 64 bits. The two halves of its element ``i`` are xored, and the result
    is mixed in 32 bits, in which most devices compute fastest. Integers wrap.
    """
    bits = (index * _signed(_GAMMA)).add_(state)
    bits.bitwise_xor_(bits << 32).bitwise_right_shift_(32)  # the xor of both halves, which fits in 32 bits
    return (_mix_32(bits.to(torch.int32)) >> 8).bitwise_and_(2**24 - 1).to(torch.float32).mul_(2.0**-24)


def stream(random: Tensor, key: int) -> Tensor:
    """The 64-bit state of the stream of seed, step and key, which are mixed in one after the other (SplitMix64)."""
    seed, step = random[0], random[1]
    return _mix(_mix(_mix(seed + _signed(_GAMMA)) + step * _signed(_GAMMA)) + _signed(key * _GAMMA))


def poisson_quantile(rate: Tensor, chance: Tensor) -> Tensor:
    """The smallest whole number that a Poisson variable of each rate does not exceed with this chance, in float64.

    ``chance``: float64 in [0, 1 - 2**-48]. ``rate``: up to 2**53. Bisects the cumulative distribution between Chernoff
    bounds, which hold for such a chance.
    """
    spread = 9 * rate.sqrt()
    low = (rate - spread).floor().clamp_min(0) - 1
    high = (rate + spread).ceil() + 60
    for _ in range(32):
        middle = ((low + high) / 2).floor()
        is_enough = (torch.special.gammaincc(middle.clamp_min(0) + 1, rate) >= chance) & (middle > low)
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high


def seeded(random: Tensor, key: int, name: str, *args: Any) -> Any:
    """Run a random op by name (``aten.binomial.default``) with torch's own generator, and restore that afterwards.

    ``args``: in the order of the op's schema. The generator's seed depends on seed, step and key alone, so that the
    whole result is the same on every rank, on one kind of device.
    """
    op = torch.ops
    for part in name.split("."):
        op = getattr(op, part)
    schema: Any = op._schema
    positional = dict(zip((argument.name for argument in schema.arguments), args, strict=True))
    named = {argument.name: positional.pop(argument.name) for argument in schema.arguments if argument.kwarg_only}
    if "device" in named:
        named["device"] = random.device
    if random.is_meta:
        return _on_meta(op, list(positional.values()), named)
    with torch.random.fork_rng([random.device] if random.is_cuda else []):
        torch.manual_seed(int(_mix(stream(random, key))))
        return op(*positional.values(), **named)  # type: ignore[operator]


def _on_meta(op: Any, args: list[Any], named: dict[str, Any]) -> Any:
    """The result of an op on meta; an op without a meta kernel runs once on zeros."""
    try:
        return op(*args, **named)
    except NotImplementedError:
        zeros = [torch.zeros_like(arg, device="cpu") if isinstance(arg, Tensor) else arg for arg in args]
        result = op(*zeros, **named)
        return result.to("meta") if isinstance(result, Tensor) else tuple(each.to("meta") for each in result)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64 bits."""
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _mix_32(x: Tensor) -> Tensor:
    """A bijection of 32 bits, each of which changes about half of the result's (lowbias32, Wellons 2018). In place."""
    for shift, factor in _MIX_32:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(2**16 - 1))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right, with zeros at the top; ``>>`` alone copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """The int64 with the same low 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63


rule(uniform, "_, ... -> ...")
rule(poisson_quantile, "..., ... -> ...")
