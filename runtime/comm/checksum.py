"""The bytes of a tensor, and a 64-bit checksum of them that depends on their order, in a few vectorized ops."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 2**17  # words of 8 bytes that are weighted at a time: as many as fit into a processor's cache
GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, as in splitmix64


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a tensor's values, a 0-dim int64 tensor on its device; the host waits for nothing.

    Each word of 8 bytes is mixed, so that its high bits count as much as its low ones, and multiplied by a
    pseudo-random weight of its position; the products are added modulo 2**64. Equal bits have equal checksums, NaN
    included. A difference in bits or in their order goes unnoticed with a probability of about 2**-32.
    """
    words = _words(tensor)
    chunks = words.split(CHUNK) if words.numel() else (words,)
    sums = [_weighted_sum(chunk) for chunk in chunks]
    return sums[0] if len(sums) == 1 else _weighted_sum(torch.stack(sums))


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in order; a view of its memory if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without numpy, which need not be installed."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.stride(), tensor.device)
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int64 words, padded with zeros."""
    data = raw_bytes(tensor)
    if rest := data.numel() % 8:
        data = pad(data, (0, 8 - rest))
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _weighted_sum(words: Tensor) -> Tensor:
    mixed = words * GOLDEN
    mixed ^= mixed >> 32
    count, device = words.numel(), words.device
    weights = _cached_weights(CHUNK, device)[:count] if count <= CHUNK else _weights(count, device)
    return torch.dot(mixed, weights) if mixed.device.type == "cpu" else (mixed * weights).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, equal on all machines: splitmix64's mix (Steele et al. 2014) of 1, 2, 3, ..."""
    x = torch.arange(1, count + 1, device=device) * GOLDEN
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1


_cached_weights = lru_cache(maxsize=8)(_weights)
