"""Checksums see every bit of a tensor and where it is, in any dtype and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardc.runtime.comm import checksum as module
from shardc.runtime.comm.checksum import checksum

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


def number(tensor: Tensor) -> int:
    return int(checksum(tensor))


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_hand(words: list[int]) -> int:
    """The checksum in Python's own integers."""
    golden, total = 0x9E3779B97F4A7C15, 0
    for i, word in enumerate(words, 1):
        mixed = word * golden % 2**64
        mixed ^= (mixed >> 32) | (0xFFFFFFFF << 32 if mixed >> 63 else 0)
        weight = i * golden % 2**64
        weight = (weight ^ weight >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        weight = (weight ^ weight >> 27) * 0x94D049BB133111EB % 2**64
        total += mixed * (weight ^ weight >> 31 | 1)
    return (total + 2**63) % 2**64 - 2**63


def test_the_number_is_the_same_on_every_machine() -> None:
    assert number(torch.arange(-500, 500)) == by_hand([*range(-500, 500)])
    assert number(torch.tensor([1.0, -2.0, 0.5])) == by_hand([0xC00000003F800000, 0x3F000000])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_of_one_element_or_of_the_order_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    x = some(dtype, 5, 7)
    for i, j in ((0, 0), (2, 3), (4, 6)):
        y = x.clone()
        y[i, j] = 1 - int(y[i, j].real)
        assert number(y) != number(x)
    assert number(x.clone()) == number(x)
    assert (
        len({number(x[order]) for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [0, 1, 2, 4, 3], [4, 3, 2, 1, 0])}) == 4
    )


def test_rows_that_differ_in_a_sign_or_in_the_place_of_a_one_count_by_position() -> None:
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(50)
    hot = torch.eye(64, dtype=torch.int64)
    for x in (signs, signs.float(), hot, hot.double(), hot.float(), hot.bool()):
        seen = {number(x)}
        for i in range(0, len(x) - 1, 2):
            y = x.clone()
            y[[i, i + 1]] = x[[i + 1, i]]
            seen.add(number(y))
        assert len(seen) == 1 + len(x) // 2


def test_the_bits_count_not_the_layout() -> None:
    x = torch.randn(6, 10)
    for view in (x.t().contiguous().t(), torch.stack([x, x], 1)[:, 0], torch.cat([x.new_zeros(1), x.flatten()])[1:]):
        assert number(view) == number(x)
    z = torch.randn(5, dtype=torch.complex64)
    assert number(z.conj()) == number(z.conj().resolve_conj().clone()) != number(z)
    nan = torch.tensor([float("nan"), 1.0])
    assert number(nan) == number(nan.clone()) and number(torch.tensor(-0.0)) != number(torch.tensor(0.0))
    assert number(torch.zeros(0, 4)) == 0
    assert number(torch.tensor(3)) == number(torch.tensor([3])) != number(torch.tensor(4))
    assert number(torch.randn(3).requires_grad_()) is not None


def test_long_tensors_are_summed_in_chunks_of_which_each_has_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 8)
    x = torch.arange(8 * 21 + 3)
    assert number(x) != number(torch.cat([x[8:16], x[:8], x[16:]])) != number(torch.cat([x[:-1], x[-1:] + 1]))
