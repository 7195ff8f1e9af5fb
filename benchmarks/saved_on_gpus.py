"""Activations saved for backward on a GPU: kept on the device, kept in host memory, or recomputed.

    python benchmarks/saved_on_gpus.py --layers 12 --width 1024

A GPT takes steps in float32 and in bfloat16 on one GPU. Prints for each way the median step, the peak of allocated
memory and the one that the ledger announces, and the largest difference of gradients from those of values saved on the
device, relative to the largest gradient. Exits with 1 if that exceeds rounding: attention kernels sum gradients in any
order. ``--device cpu`` tests only the script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from gpt import GPT, Config
from torch import Tensor

import shardc
from shardc import Mesh, Precision, Remat
from shardc.language.text import table

PRECISIONS = {"float32": None, "bfloat16": Precision(compute=torch.bfloat16)}
FAR = {"float32": 1e-4, "bfloat16": 3e-2}  # largest allowed difference between the gradients of two runs
STEPS, HEAD = 6, 64


def ways(layers: int) -> dict[str, dict[str, Any]]:
    """Options by the name of a way; backward reads the values of the last block right after they are saved."""
    return {
        "on the device": {},
        "in host memory": {"saved": {"blocks.*": "host", f"blocks.{layers - 1}*": None}},
        "MLPs in host memory": {"saved": {"blocks.*.mlp*": "host"}},
        "computed again": {"remat": Remat("blocks.*")},
    }


class Run:
    """Steps of a new GPT. ``gradients``: those of the first step. ``row``: its cells of the table."""

    def __init__(self, config: Config, batch: int, device: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        ids, targets = torch.randint(config.vocab, (2, batch, config.context)).to(device)
        parallel = shardc.parallelize(GPT(config).to(device), Mesh(dp=1), args=(ids, targets), **options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        self.gradients, seconds, peak = list[Tensor](), list[float](), 0
        for _ in range(STEPS):
            _synchronize(device)
            start = perf_counter()
            parallel(ids, targets).backward()
            if not self.gradients:
                self.gradients = [each.grad.cpu() for each in parallel.parameters() if each.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            peak = max(peak, _synchronize(device))
            seconds.append(perf_counter() - start)
        memory = parallel.program.memory
        gigabytes = [f"{each / 1e9:.2f}" for each in (peak, memory["peak"], memory.get("saved_below", 0))]
        self.row = f"{1e3 * median(seconds[2:]):.1f}", *gigabytes

    def distance(self, other: Run) -> float:
        """The largest difference of a gradient from that of another run, relative to the largest gradient."""
        largest = max(float(each.abs().max()) for each in other.gradients)
        pairs = zip(self.gradients, other.gradients, strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs) / largest


def _synchronize(device: str) -> int:
    """Wait for a GPU; returns the peak of its memory since the last call."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> int:
    """Take steps in every way, and print a table; returns 1 if gradients differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, default in (("layers", 4), ("width", 1024), ("context", 1024), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was measured", file=sys.stderr)
        return 1
    sizes = {"context": options.context, "layers": options.layers, "width": options.width}
    config = Config(vocab=8192, heads=options.width // HEAD, fused=False, **sizes)
    rows, far = list[tuple[str, ...]](), list[str]()
    for dtype, precision in PRECISIONS.items():
        first: Run | None = None
        for name, further in ways(options.layers).items():
            run = Run(config, options.batch, options.device, {"precision": precision, **further})
            first = first or run
            distance = run.distance(first)
            far += [f"{name}, {dtype}"] * (distance > FAR[dtype])
            rows.append((dtype, name, *run.row, f"{distance:.1e}"))
    print(table(("dtype", "saved", "step, ms", "peak, GB", "announced", "below", "gradients differ"), rows))
    print(f"gradients differ by more than rounding: {', '.join(far)}" if far else "gradients differ by rounding alone")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
