"""Uniform numbers depend on seed, step, key and global index alone, and look random along each."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.ops.random import _mix, uniform

COUNT = 1 << 16
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def draw(seed: int = 1, step: int = 0, key: int = 0, start: int = 0, stride: int = 1) -> torch.Tensor:
    return uniform(torch.tensor([seed, step]), key, torch.arange(COUNT) * stride + start).double()


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def mix_32(z: int) -> int:
    z = (z ^ (z >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    z = (z ^ (z >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return z ^ (z >> 16)


def reference(seed: int, step: int, key: int, index: int) -> float:
    """The same in integers without bounds."""
    state = mix(mix(mix(seed + GAMMA & MASK) + step * GAMMA & MASK) + key * GAMMA & MASK)
    bits = state + index * GAMMA & MASK
    return (mix_32(bits >> 32 ^ bits & 0xFFFFFFFF) >> 8) / 2**24


def test_the_mixer_is_splitmix64s() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    state = torch.tensor([(1234567 + (i + 1) * GAMMA & MASK) - (1 << 64) * ((1234567 + (i + 1) * GAMMA & MASK) >> 63)
                          for i in range(5)])  # fmt: skip
    assert [value & MASK for value in _mix(state).tolist()] == published


@given(INT64, INT64, st.integers(0, 1 << 64), INT64)
def test_every_number_is_what_integers_without_bounds_give(seed: int, step: int, key: int, index: int) -> None:
    found = uniform(torch.tensor([seed, step]), key, torch.tensor([index]))
    assert found.dtype == torch.float32
    assert found.item() == reference(seed, step, key, index)


def test_numbers_lie_in_the_unit_interval_on_a_grid_of_24_bits() -> None:
    found = draw()
    assert 0 <= found.min() and found.max() < 1
    assert torch.equal(found * 2**24, (found * 2**24).round())
    assert len(found.unique()) > COUNT * 0.99


@pytest.mark.parametrize("key", [0, 1, 8153, 2**32 - 1])
def test_mean_variance_and_histogram_are_uniform(key: int) -> None:
    found = draw(key=key)
    assert abs(found.mean() - 1 / 2) < 5 * (1 / 12 / COUNT) ** 0.5
    assert abs(found.var() - 1 / 12) < 5 * (1 / 180 / COUNT) ** 0.5
    expected = COUNT / 64
    chi_square = ((torch.histc(found, 64, 0, 1) - expected) ** 2 / expected).sum()
    assert abs(chi_square - 63) < 5 * (2 * 63) ** 0.5


STREAMS = {
    "itself": {},
    "next index": {"start": 1},
    "index in the next row": {"start": 1024},
    "every 4096th": {"stride": 4096},
    "far away": {"start": 1 << 40},
    "where the golden ratio comes back": {"start": 2971215073},  # a Fibonacci number
    "next key": {"key": 1},
    "a later key": {"key": 1 << 31},
    "next step": {"step": 1},
    "next seed": {"seed": 2},
    "step for seed": {"seed": 0, "step": 1},
    "key for step": {"step": 1, "key": -1},
}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(STREAMS, 2)])
def test_neighbouring_streams_are_uncorrelated(one: str, other: str) -> None:
    a, b = draw(**STREAMS[one]), draw(**STREAMS[other])
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(correlation) < 5 / COUNT**0.5
    agreement = ((a < 0.1) & (b < 0.1)).double().mean()  # dropout masks
    assert abs(agreement - 0.01) < 5 * (0.01 / COUNT) ** 0.5


def test_a_piece_has_the_bits_of_the_whole() -> None:
    random, index = torch.tensor([3, 5]), torch.arange(96).reshape(8, 12)
    whole = uniform(random, 7, index)
    assert torch.equal(uniform(random, 7, index[2:4, 6:]), whole[2:4, 6:])
