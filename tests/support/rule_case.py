"""Calls of ops with real arguments, each with the rule that applies to it; read from ``rule_examples.txt``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardc.ops  # noqa: F401
from shardc.language.windows import overlap_add, windows
from shardc.ops.attention.rules import RINGS
from shardc.ops.contraction import DOT_RINGS, dot
from shardc.ops.index import (
    add_at,
    gather_at,
    lookup_at,
    lookup_rows,
    put_at,
    scatter_add_at,
    scatter_added_at,
    scatter_at,
    scatter_rows,
)
from shardc.ops.random import poisson_quantile, uniform
from shardc.ops.reduction import logsumexp_from_end, sum_from_end
from shardc.ops.tier import TRANSFERS
from shardc.ops.zigzag import in_order, zigzag
from shardc.program.user_rules import Case, case_of

LINES = [line for line in Path(__file__).with_name("rule_examples.txt").read_text().splitlines() if line]
GONE = () if hasattr(torch.ops.aten, "cholesky") else ("cholesky.default",)  # ops that torch 2.14 removes
EXAMPLES = [tuple(line.split("  ", 1)) for line in LINES if not line.startswith(("#", *GONE))]


POSITION_OPS = (lookup_at, add_at, put_at, gather_at, scatter_add_at, scatter_added_at, scatter_at)
OTHER_OPS = (
    dot, *DOT_RINGS, uniform, poisson_quantile, lookup_rows, scatter_rows, windows, overlap_add, *RINGS, *TRANSFERS,
    zigzag, in_order, sum_from_end, logsumexp_from_end,
)  # fmt: skip
PYTHON_OPS = {op.__name__: op for op in (*OTHER_OPS, *POSITION_OPS)}


class Draw(dict[str, Any]):
    """The names that an example may use; any other name is a size that 2 and 3 divide."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            F=self.floats,
            P=self.positive,
            U=self.unit,
            I=self.ints,
            M=self.mask,
            S=self.positive_definite,
            R=torch.arange,
            CUDA=self.cuda,
            float32=torch.float32,
            float64=torch.float64,
            int32=torch.int32,
            int64=torch.int64,
            uint64=torch.uint64,
        )
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def __missing__(self, name: str) -> int:
        self[name] = self.random.choice((6, 12))
        return self[name]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        return self.floats(*shape).abs() + 0.5

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return self.floats(*shape) > 0

    def positive_definite(self, *shape: int) -> Tensor:
        x = self.floats(*shape, shape[-1])
        return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)

    def cuda(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "meta"
        return self.floats(*shape).abs().to(dtype).to(device)


def make_case(name: str, text: str, seed: int) -> Case:
    args, kwargs = eval(f"call({text})", {}, _with_call(Draw(seed)))  # safe: the text comes from our own table
    return case_of(op_named(name), args, kwargs)


def _with_call(draw: Draw) -> Draw:
    draw["call"] = lambda *args, **kwargs: (args, kwargs)
    return draw


def op_named(name: str) -> Any:
    if name in PYTHON_OPS:
        return PYTHON_OPS[name]
    *namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, (namespace or ["aten"])[0]), op), overload)
