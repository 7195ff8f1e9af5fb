"""Products of matrices by torch and by oneDNN, in turn on one thread: where oneDNN takes less time, shardc calls it.

python benchmarks/products.py

Prints microseconds, medians, of a linear layer's forward and of the gradient of its input, by tokens and features.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from shardc.ops.contraction import multiplied
from shardc.runtime.execute import instruction as onednn

SIZES = [
    (64, 64, 256), (256, 64, 256), (512, 64, 256), (512, 256, 256), (512, 256, 1024), (512, 1024, 256),
    (512, 256, 4096), (2048, 256, 1024), (2048, 768, 768), (2048, 768, 3072), (1, 4096, 4096),
]  # fmt: skip
ROUNDS = 25


def main() -> None:
    """A line for each size."""
    torch.set_num_threads(1)
    calls = onednn.is_faster(torch.float32, torch.device("cpu"))
    print(
        f"{torch.cpu.get_capabilities().get('cpu_name')}: shardc calls {'oneDNN' if calls else 'torch'} for large ones"
    )
    print("| tokens | in | out | torch | oneDNN | ratio | gradient: torch | oneDNN | ratio | chosen |")
    print("| --- " * 10 + "|")
    for tokens, features, made in SIZES:
        x, weight, bias = torch.randn(tokens, features), torch.randn(made, features), torch.randn(made)
        forward = timed(x, weight.t(), bias)
        backward = timed(torch.randn(tokens, made), weight, None)
        chosen = "oneDNN" if calls and onednn.choose(tokens, features, made) else "torch"
        numbers = " | ".join(f"{a:.0f} | {b:.0f} | {b / a:.2f}" for a, b in (forward, backward))
        print(f"| {tokens} | {features} | {made} | {numbers} | {chosen} |")


def timed(left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[float, float]:
    """Microseconds of torch and of oneDNN."""
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 2):
        for linear, found in zip((multiplied, onednn.linear), times, strict=True):
            start = time.perf_counter()
            linear(left, right, bias)
            found.append(1e6 * (time.perf_counter() - start))
    one, other = (median(found[2:]) for found in times)
    return one, other


if __name__ == "__main__":
    main()
