"""The kernels behind initial values and draws give an element the same bits, whatever the size of the tensor."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.runtime.initialize.initialize import STEADY

COUNT = 3000
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = {"number": 0.7, "int": 1, "float": 0.5}


def sample(op: Any, dtype: torch.dtype) -> list[Any]:
    """Arguments of a call over many elements, in a range where these functions have values."""
    generator = torch.Generator().manual_seed(0)
    args: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            args.append(torch.rand(COUNT, dtype=torch.float64, generator=generator).mul(1.9).sub(0.95).to(dtype))
        elif not argument.kwarg_only and not argument.has_default_value():
            args.append(NUMBERS.get(kind))
    return args


def part(args: list[Any], start: int, stop: int) -> list[Any]:
    return [arg[start:stop].clone() if isinstance(arg, Tensor) else arg for arg in args]


def bits(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    chance, held = random.Random(0), 0
    for op in sorted(STEADY, key=str):
        args = sample(op, dtype)
        try:
            whole = op(*args)
        except (RuntimeError, TypeError):
            continue  # not of floats
        held += 1
        for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 65, 100, 1001):
            start = chance.randrange(COUNT - length)
            found = op(*part(args, start, start + length))
            assert torch.equal(bits(found), bits(whole[start : start + length])), (op, start, length)
    assert held > 30
