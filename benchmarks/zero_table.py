"""Memory of a rank between steps under ZeRO: the table of the paper (Rajbhandari et al., 2020), from shardc's ledger.

    python benchmarks/zero_table.py

The first table has GB a rank (10**9 bytes) of parameters, gradients and Adam's states, as ``shardc dump`` announces
them, by model size and number of data parallel ranks. Numbers follow the paper's accounting, with all but the
optimizer's states in bfloat16; in brackets, gradients are reduced and kept in float32, which is shardc's default.
Nothing is allocated. A model has the stated size within a thousandth, and its memory is scaled to the exact size.

The second table is for a GPT of half a billion parameters on four ranks: bytes per parameter of these states between
steps, and at their peak within a step, with gathered parameters and gradients before their reduction. The last column
is the size of the largest layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from gpt import DATA, GPT, Config
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Precision, Zero
from shardc.costs.ledger import Block
from shardc.costs.replay import ledgers_of
from shardc.program.communication import members
from shardc.program.program import Program

SIZES = {"7.5 B": 7_500_000_000, "128 B": 128_000_000_000, "1 T": 1_000_000_000_000}
RANKS = (1, 64, 1024)
STAGES = (None, 1, 2, 3)
PAPER = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
OURS = Precision()


class Matrices(nn.Module):
    """Linear layers without biases, whose widths are multiples of the largest number of ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths(size))))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares of the result."""
        y: Tensor = self.layers(x)
        return y.float().square().mean()


def widths(size: int) -> Iterator[int]:
    """Widths of matrices with ``size`` elements in all, or a thousandth more: three squares and the rest."""
    step = RANKS[-1]
    width = int((size / 3) ** 0.5) // step * step
    yield from [width] * 4
    left = size - 3 * width**2
    while left > 0:
        following = max(step, left // width // step * step)
        yield following
        left, width = left - width * following, following


def held(size: int, ranks: int, stage: int | None, precision: Precision) -> float:
    """GB of a rank between steps for a model of this size, rounded to three digits."""
    with torch.device("meta"):
        model = Matrices(size)
    x = torch.empty(ranks, next(model.parameters()).shape[1], device="meta")
    zero = None if stage is None else Zero("dp", stage)  # type: ignore[arg-type]
    memory = shardc.compile(model, Mesh(dp=ranks), {"x": P("dp")}, args=(x,), zero=zero, precision=precision).memory
    lasting = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    return float(f"{lasting / sum(each.numel() for each in model.parameters()) * size / 1e9:.3g}")


def largest_layer(model: GPT) -> int:
    """Bytes of the parameters of the largest layer: a block, or a module outside the blocks."""
    layers: list[nn.Module] = [*model.blocks, *(each for name, each in model.named_children() if name != "blocks")]
    return max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)


def most_states(program: Program) -> int:
    """The peak of the bytes of gathered parameters and of gradients before and after their reductions."""
    ends = zip(program.outputs, program.results, strict=True)
    gradients = {program.value(node) for output, node in ends if output.kind == "gradient" and node is not None}
    backward = [node for node in program.calls if program.source(node).phase == "backward"]
    sums = [part for node in backward for part in members(node) if part.kind in ("all_reduce", "reduce_scatter")]
    gradients |= {program.value(part.operand) for part in sums}

    def is_state(block: Block) -> bool:
        return block.value in gradients or block.kind == "gathered"

    return max(max(ledger.balances(is_state)) for ledger in ledgers_of(program))


def within_step(stage: int | None) -> tuple[float, float, float]:
    """Bytes per parameter on four ranks: between steps, at the peak of a step, and of the largest layer."""
    with torch.device("meta"):
        model = GPT(Config(vocab=32000, context=1024, layers=8, heads=16, width=2048))
        ids = torch.empty(8, 1024, dtype=torch.int64)
    zero = None if stage is None else Zero("dp", stage)  # type: ignore[arg-type]
    compiled = shardc.compile(model, Mesh(dp=4), DATA, args=(ids, ids), zero=zero)
    kept = compiled.memory["parameters"] + compiled.memory["optimizer"]
    most = kept + most_states(compiled.whole)
    size = sum(parameter.numel() for parameter in model.parameters())
    return (kept + compiled.memory["gradients"]) / size, most / size, largest_layer(model) / size


def main() -> None:
    """Print both tables."""
    print("| parameters | ranks | data parallel | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|---|")
    for (name, size), ranks in product(SIZES.items(), RANKS):
        pairs = [[held(size, ranks, stage, precision) for precision in (PAPER, OURS)] for stage in STAGES]
        print(f"| {name} | {ranks} |", *(f"{paper:g} ({ours:g}) |" for paper, ours in pairs))
    print("\n| fp32, four ranks | between steps | within a step | a layer |\n|---|---|---|---|")
    for stage in STAGES:
        found = within_step(stage)
        print("| data parallel |" if stage is None else f"| stage {stage} |", *(f"{each:.2f} |" for each in found))


if __name__ == "__main__":
    main()
