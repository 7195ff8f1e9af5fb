"""What a rank holds between steps under ZeRO: the table of the paper (Rajbhandari et al., 2020), from shardc's ledger.

    python benchmarks/zero_table.py

For each size and number of data parallel ranks GB a rank (10**9 bytes) of parameters, gradients and Adam's states, as
``shardc dump`` announces them: by the paper's accounting, all but the optimizer's states in bfloat16, and in brackets
with gradients that are reduced and kept in float32, as shardc does unless told otherwise. Nothing is allocated. A
model's size is met within a thousandth, and what it holds is scaled by the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Precision, Zero

SIZES = {"7.5 B": 7_500_000_000, "128 B": 128_000_000_000, "1 T": 1_000_000_000_000}
RANKS = (1, 64, 1024)
STAGES = (None, 1, 2, 3)
PAPER = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
OURS = Precision()


class Matrices(nn.Module):
    """Linear layers without biases, all of whose widths divide by the largest number of ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths(size))))

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        y: Tensor = self.layers(x)
        return y.float().square().mean()


def widths(size: int) -> Iterator[int]:
    """Widths of matrices with so many elements, or a thousandth more: three squares, and what is left."""
    step = RANKS[-1]
    width = int((size / 3) ** 0.5) // step * step
    yield from [width] * 4
    left = size - 3 * width**2
    while left > 0:
        following = max(step, left // width // step * step)
        yield following
        left, width = left - width * following, following


def held(size: int, ranks: int, stage: int | None, precision: Precision) -> float:
    """GB that a rank holds of a model of that size between steps, to three digits."""
    with torch.device("meta"):
        model = Matrices(size)
    x = torch.empty(ranks, next(model.parameters()).shape[1], device="meta")
    zero = None if stage is None else Zero("dp", stage)  # type: ignore[arg-type]
    memory = shardc.compile(model, Mesh(dp=ranks), {"x": P("dp")}, args=(x,), zero=zero, precision=precision).memory
    lasting = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    return float(f"{lasting / sum(each.numel() for each in model.parameters()) * size / 1e9:.3g}")


def main() -> None:
    """Print the table."""
    print("| parameters | ranks | data parallel | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|---|")
    for (name, size), ranks in product(SIZES.items(), RANKS):
        pairs = [[held(size, ranks, stage, precision) for precision in (PAPER, OURS)] for stage in STAGES]
        print(f"| {name} | {ranks} |", *(f"{paper:g} ({ours:g}) |" for paper, ours in pairs))


if __name__ == "__main__":
    main()
