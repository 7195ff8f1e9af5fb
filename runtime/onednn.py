"""Products of large matrices on oneDNN, on processors where the library that torch asks takes longer."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.ops.contraction import Linear, multiplied

from .functional import is_traced

LARGE = 1 << 24  # multiplications that are worth a call that takes some 12 µs longer
WIDE = 8  # rows and columns of all: of fewer a product takes as long as reading what is multiplied


def is_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether large products are: those in float32 on AMD's AVX-512, where MKL takes 1.05 to 1.2 times as long.

    ``benchmarks/products.py`` measures it. Not where it is switched off: ``torch.backends.mkldnn.enabled = False``.
    """
    if dtype != torch.float32 or device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    processor = torch.cpu.get_capabilities()
    is_amd = "AMD" in str(processor.get("cpu_name")) and bool(processor.get("avx512_f"))
    return is_amd and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def choose(rows: int, contracted: int, columns: int) -> Linear | None:
    """What multiplies two matrices of these sizes, if not torch."""
    return linear if min(rows, contracted, columns) >= WIDE and rows * contracted * columns >= LARGE else None


def linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias``; as torch does it where ``left`` is no matrix row by row, or where ops are recorded."""
    is_dense = right.is_contiguous() or right.mT.is_contiguous()
    if is_traced() or not (left.is_contiguous() and is_dense and (bias is None or bias.is_contiguous())):
        return multiplied(left, right, bias)
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right.mT, bias, "none", [], "")
    return made
