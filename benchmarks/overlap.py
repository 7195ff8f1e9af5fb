"""Matrix products in rings compared with plain ones: layers whose positions ``tp`` cuts between products.

    python benchmarks/overlap.py                              # 2 ranks
    python benchmarks/overlap.py --ranks 4 --mbit 2000        # over a network of 2000 Mbit/s (Linux, as root)
    python benchmarks/overlap.py --positions 1024 --width 1024 --rounds 9

Each layer is a norm and a gated MLP; a step is forward and backward with batch 1. Both ways live in the same processes
and take their steps in turn. Prints for each way the median step of the slowest rank, the ratio of the plain step to
it, the bytes that a rank sends and that its plan announces, and the largest error relative to the plain way.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from bench import network
from breakdown import Clock
from rounds import everyone_first, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc import P
from shardc.language.text import table
from shardc.runtime.comm.launch import Workers
from shardc.runtime.comm.messages import sent_bytes

WAYS: dict[str, str | None] = {"plain": None, "ring": "ring"}
BETWEEN, INSIDE = P(None, "tp"), P(None, None, "tp")
ANNOTATIONS = {"x": BETWEEN, "*.norm": BETWEEN, "*.up": INSIDE, "*.gate": INSIDE, "*.down": BETWEEN}


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its input, ``[1, positions, width]``."""

    positions: int
    layers: int
    width: int


class Layer(nn.Module):
    """A norm and a gated MLP, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(4 * width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, position, width]`` in and out."""
        h = self.norm(x)
        out: Tensor = self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))
        return x + out


class Model(nn.Module):
    """Layers with the same weights at every call."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(size.width) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(slots=True)
class Measured:
    """One way, on this rank: the bytes that its plan announces, and by round its seconds and the bytes of all ranks."""

    announced: int
    error: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)


def measure(size: Size, rounds: int) -> dict[str, Measured]:
    """Measure the steps of both ways, on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = torch.randn(1, size.positions, size.width, generator=torch.Generator().manual_seed(1))
    model = Model(size)
    modules = {name: shardc.parallelize(model, mesh, ANNOTATIONS, overlap=way) for name, way in WAYS.items()}
    values = {name: _step(module, x) for name, module in modules.items()}
    found = {
        name: Measured(sum(each.wire_bytes for each in module.program.collectives)) for name, module in modules.items()
    }
    found["ring"].error = max(
        (mine - plain).abs().max().item() / max(1.0, plain.abs().max().item())
        for mine, plain in zip(values["ring"], values["plain"], strict=True)
    )
    for i in range(rounds):
        for name in everyone_first([*WAYS], i):
            before, _ = sent_bytes(), dist.barrier()
            start = Clock.now()
            _step(modules[name], x)
            found[name].seconds[i] = start.until_now().seconds
            dist.barrier()
            after = sent_bytes()
            dist.barrier()
            found[name].sent.append(float("nan") if before is None or after is None else after - before)
    return found


def _step(module: Any, x: Tensor) -> list[Tensor]:
    """The loss and this rank's parts of the gradients."""
    module.zero_grad()
    loss = module(x)
    loss.backward()
    gradients = (parameter.grad for parameter in module.parameters())
    return [loss.detach(), *(each.to_local() if isinstance(each, DTensor) else each for each in gradients)]


def report(ranks: list[dict[str, Measured]]) -> str:
    """A table with a row for each way, from the measurements of all ranks."""
    slowest = {name: {i: max(rank[name].seconds[i] for rank in ranks) for i in ranks[0][name].seconds} for name in WAYS}
    rows = []
    for name, way in ranks[0].items():
        beside = "" if name == "plain" else str(ratio(slowest["plain"], slowest[name]))
        sent = fmean(way.sent) / len(ranks) / 1e6
        error = max(rank[name].error for rank in ranks)
        step = f"{median(slowest[name].values()):.3f}"
        rows.append((name, step, beside, f"{sent:.2f}", f"{way.announced / 1e6:.2f}", f"{error:.0e}"))
    return table(("way", "step, s", "plain beside it", "MB sent", "announced", "error"), rows)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 2, "positions": 512, "layers": 2, "width": 512, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mbit", type=int, help="limit the ranks' network to so many Mbit/s (Linux, as root)")
    options = parser.parse_args()
    size = Size(options.positions, options.layers, options.width)
    with network(options.mbit), Workers(options.ranks) as workers:
        ranks = workers.run(measure, size, options.rounds)
    limit = "no limit of the network" if options.mbit is None else f"{options.mbit} Mbit/s"
    print(f"{size}, {options.ranks} ranks, {limit}, medians of {options.rounds} rounds\n{report(ranks)}", flush=True)


if __name__ == "__main__":
    main()
