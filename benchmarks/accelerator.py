"""The benchmark on one CUDA device: the overhead of shardc at world size 1, and the cost of one rank of many.

    python benchmarks/accelerator.py --size medium --ranks 8

At world size 1, shardc through Inductor is compared to ``torch.compile`` of the plain model, with alternating steps.
One rank of many runs with collectives that do nothing (torch's ``fake`` process group): its memory and kernel time are
those of a rank of a real job whose network takes no time. Its losses are meaningless.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
import torch.distributed as dist
from rounds import ratio
from row import new_trainer
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer import SIZES, Job, Size, Trainer, batches

STUBBED = ("FSDP2", "Megatron by hand", "DTensor plan", "shardc dp", "shardc zero3", "shardc tp")


def main() -> None:
    """Print both sections, or a message if there is no CUDA device."""
    options = _parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: this section is left out", file=sys.stderr)
        return
    size = SIZES[options.size]
    _join(1)
    print(alone(size, options.device, options.steps))
    dist.destroy_process_group()
    _join(options.ranks)
    print(one_of_many(size, Job(options.ranks, device=options.device), options.steps))
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to check that it runs")
    return parser.parse_args()


def _join(ranks: int) -> None:
    """Join a fake job of ``ranks`` ranks as its rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def alone(size: Size, device: str, steps: int) -> str:
    """Compare shardc at world size 1 with the compiled plain model, with alternating steps."""
    plain, ours = (new_trainer(name, size, Job(1, device=device)) for name in ("one device", "shardc dp inductor"))
    plain.model = torch.compile(plain.model)
    batch = batches(size, device)[0]
    first = [seconds(trainer, batch) for trainer in (ours, plain)]
    pairs = [(seconds(ours, batch), seconds(plain, batch)) for _ in range(steps + 3)][3:]
    columns = [list(column) for column in zip(*pairs, strict=True)]
    names = "shardc at world size 1, Inductor", "torch.compile of the plain model"
    lines = [
        f"{name}: {statistics.median(column) * 1e3:.2f} ms a step, the first {once:.1f} s"
        for name, column, once in zip(names, columns, first, strict=True)
    ]
    return "\n".join((*lines, f"ratio {ratio(*(dict(enumerate(column)) for column in columns))}"))


def one_of_many(size: Size, job: Job, steps: int) -> str:
    """One rank of many: milliseconds a step and peak memory of each plan."""
    lines = ["| who | ms a step | MB peak |", "| --- | --- | --- |"]
    batch = batches(size, job.device)[0]
    lines += [f"| {name} | {measured(new_trainer(name, size, job), batch, steps)} |" for name in STUBBED]
    return "\n".join(lines)


def measured(trainer: Trainer, batch: torch.Tensor, steps: int) -> str:
    """The median milliseconds of a step and the peak memory, as table cells."""
    for _ in range(3):
        trainer.step(batch)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds(trainer, batch) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return f"{median * 1e3:.2f} | {peak / 1e6:.1f}"


def seconds(trainer: Trainer, batch: torch.Tensor) -> float:
    """Seconds of one step, until its kernels have ended."""
    start = time.perf_counter()
    trainer.step(batch)  # reads the loss
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
