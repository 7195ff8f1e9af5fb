"""Attention on a GPU: torch's kernels and shardc's, as one op, as a ring and in zigzag, compared with plain torch.

    python benchmarks/attention_on_gpus.py                           # one GPU; the ranks are virtual
    python benchmarks/attention_on_gpus.py --only dropout --positions 8192

For each kind of attention and each mesh, prints the error of loss and gradients relative to plain attention in float64,
the error of plain torch in the same dtype, and the time and memory of a step of both. Virtual ranks share one GPU, so
the time of a ring is that of all its ranks together. Dropout is compared with the same plan on one rank, since plain
torch draws other numbers. Exits with 1 if an error is more than twice that of plain torch, or than a fixed bound with
dropout. ``--device cpu`` tests only the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import shardc
from shardc import Mesh, P
from shardc.language.text import table

WIDTH, HEADS, RANKS, WINDOW, RATE = 512, 8, 4, 300, 0.1
MIB = 2**20


class Attention(nn.Module):
    """Multi-head attention with projections and a residual connection; ``[batch, position, width]`` in and out."""

    def __init__(
        self, attend: Callable[..., Tensor], key_heads: int = HEADS, value_size: int = WIDTH // HEADS, biased: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(1, HEADS, biased, biased)) if biased else None
        self.attend, self.sizes = attend, (WIDTH // HEADS, WIDTH // HEADS, value_size)
        self.heads = (HEADS, key_heads, key_heads)
        self.inner = nn.ModuleList(
            nn.Linear(WIDTH, n * size, bias=False) for n, size in zip(self.heads, self.sizes, strict=True)
        )
        self.out = nn.Linear(HEADS * value_size, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        each = zip(self.inner, self.heads, strict=True)
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in each)
        attended = self.attend(q, k, v) if self.bias is None else self.attend(q, k, v, self.bias)
        return mse_loss((x + self.out(attended.transpose(1, 2).flatten(2))).float(), target.float())


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which each query sees the keys up to its own."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which each query sees ``WINDOW`` keys, its own last."""
    row, column = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    seen = (column <= row.unsqueeze(1)) & (column > row.unsqueeze(1) - WINDOW)
    return scaled_dot_product_attention(q, k, v, seen)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with dropout."""
    return scaled_dot_product_attention(q, k, v, dropout_p=RATE, is_causal=True)


def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Windowed attention by ``flex_attention``."""

    def is_seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column > row - WINDOW)

    seen = create_block_mask(is_seen, None, None, q.shape[2], k.shape[2], device=q.device.type)
    out: Tensor = flex_attention(q, k, v, block_mask=seen)
    return out


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with capped scores, as in Gemma 2, by ``flex_attention``."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return 2.0 * torch.tanh(score / 2.0)

    out: Tensor = flex_attention(q, k, v, cap)
    return out


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention with a learned bias, as in T5."""
    return scaled_dot_product_attention(q, k, v, bias)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of attention, and the kernel of torch that computes it."""

    attend: Callable[..., Tensor]
    dtype: torch.dtype
    kernel: SDPBackend | None = None
    key_heads: int = HEADS
    value_size: int = WIDTH // HEADS
    options: tuple[tuple[str, Any], ...] = ()

    def model(self, device: str, positions: int, dtype: torch.dtype | None = None) -> nn.Module:
        """The model, with the same weights at every call."""
        num_biased = positions if self.attend is biased else 0
        return Attention(self.attend, self.key_heads, self.value_size, num_biased).to(device, dtype or self.dtype)

    def chosen(self, device: str) -> Any:
        """A context in which torch computes attention with the kernel; on a CPU it does nothing."""
        return nullcontext() if self.kernel is None or device == "cpu" else sdpa_kernel(self.kernel)


HALF, SINGLE = torch.bfloat16, torch.float32
CASES = {
    "causal, flash": Case(causal, HALF, SDPBackend.FLASH_ATTENTION),
    "causal, cuDNN": Case(causal, HALF, SDPBackend.CUDNN_ATTENTION),
    "causal, efficient": Case(causal, SINGLE, SDPBackend.EFFICIENT_ATTENTION),
    "causal, efficient, bf16": Case(causal, HALF, SDPBackend.EFFICIENT_ATTENTION),
    "causal, 2 key heads": Case(causal, HALF, SDPBackend.FLASH_ATTENTION, key_heads=2),
    "causal, values of 128": Case(causal, SINGLE, SDPBackend.EFFICIENT_ATTENTION, value_size=128),
    "window": Case(windowed, HALF, SDPBackend.EFFICIENT_ATTENTION),
    "window, float32": Case(windowed, SINGLE, SDPBackend.EFFICIENT_ATTENTION),
    "window, flex": Case(flexible, SINGLE),
    "cap, flex": Case(capped, SINGLE),
    "bias": Case(biased, HALF, SDPBackend.EFFICIENT_ATTENTION),
    "bias, float32": Case(biased, SINGLE, SDPBackend.EFFICIENT_ATTENTION),
    "causal, Inductor": Case(causal, HALF, SDPBackend.FLASH_ATTENTION, options=(("compile", "inductor"),)),
    "dropout": Case(dropped, HALF),
    "dropout, float32": Case(dropped, SINGLE),
}
CUT = {
    "one op": (Mesh(device_ids=None, cp=1), {}),
    "ring": (Mesh(device_ids=None, cp=RANKS), dict.fromkeys(("x", "target"), P(None, "cp"))),
    "zigzag": (Mesh(device_ids=None, cp=RANKS), dict.fromkeys(("x", "target"), P(None, "cp:zigzag"))),
}


def main() -> int:
    """Try every case; returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was checked", file=sys.stderr)
        return 1
    wrong = list[str]()
    for name, case in CASES.items():
        if options.only in name and not (options.device == "cpu" and case.attend in (flexible, capped)):
            try:
                rows = rows_of(name, case, options.positions, options.device, wrong)
                print(table(["", "", "error", "of torch", "ms", "of torch", "MiB", "of torch"], rows), flush=True)
            except Exception as error:  # a case that fails does not stop the others
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    print("\n".join(wrong) or "all are as near to float64 as plain torch is")
    return 1 if wrong else 0


def rows_of(name: str, case: Case, positions: int, device: str, wrong: list[str]) -> list[list[str]]:
    """The rows of one case; errors that are too large are added to ``wrong``."""
    torch.manual_seed(1)
    inputs = [torch.randn(1, positions, WIDTH, device=device, dtype=case.dtype) for _ in range(2)]
    with sdpa_kernel(SDPBackend.MATH):
        exact = step(case.model(device, positions, torch.float64), [x.double() for x in inputs])
    with case.chosen(device):
        plain = case.model(device, positions)
        error_of_torch = far(step(plain, inputs), exact)
        cost_of_torch = cost(plain, inputs, device)
    rows = []
    for layout, (mesh, cut) in CUT.items():
        with case.chosen(device):
            model = case.model(device, positions)
            parallel = shardc.parallelize(model, mesh, cut, args=tuple(inputs), **dict(case.options))
        found = step(parallel, inputs)
        if case.attend is dropped and layout == "one op":
            exact, error_of_torch = found, {HALF: 1e-2, SINGLE: 1e-5}[case.dtype]
        error, spent = far(found, exact), cost(parallel, inputs, device)
        if not error <= 2 * error_of_torch:
            wrong.append(f"{name}, {layout}: an error of {error:.1e}")
        numbers = [f"{number:.2f}" for both in zip(spent, cost_of_torch, strict=True) for number in both]
        rows.append([name, layout, f"{error:.1e}", f"{error_of_torch:.1e}", *numbers])
    return rows


def step(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The loss and all gradients of a step."""
    model.zero_grad()
    loss: Tensor = model(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [x.grad for x in model.parameters()]
    return [loss.detach(), *(x.full_tensor() if isinstance(x, DTensor) else x for x in gradients if x is not None)]


def far(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error, relative to the largest number of its tensor."""
    pairs = zip(found, exact, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in pairs)


def cost(model: nn.Module, inputs: Sequence[Tensor], device: str, rounds: int = 7) -> tuple[float, float]:
    """The median milliseconds of a step, and the peak MiB that it allocates."""
    times, module = [], torch.get_device_module(device)
    before = most = 0
    for _ in range(rounds):
        model.zero_grad()
        module.synchronize()
        if device == "cuda":
            module.reset_peak_memory_stats()
            before = module.memory_allocated()
        start = perf_counter()
        model(*inputs).backward()
        module.synchronize()
        times.append(1e3 * (perf_counter() - start))
        most = module.max_memory_allocated() if device == "cuda" else 0
    return median(times), (most - before) / MIB


if __name__ == "__main__":
    sys.exit(main())
