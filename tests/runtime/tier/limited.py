"""A model whose states are six times the memory that is left to its process: losses of torch, then those from the tier.

::

    python limited.py FOLDER|host
"""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import P, Remat, Zero

WIDTH, LAYERS, STATES, TIMES = 512, 48, 16, 6


class Residual(nn.Module):
    """Blocks of one product each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares of what comes out."""
        for block in self.blocks:
            x = x + block(x).relu() / LAYERS
        return x.square().mean()


def losses_of(model: nn.Module) -> list[float]:
    """Of three steps."""
    optimizer, x, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.ones(2, WIDTH), []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, and print the losses."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model, x = Residual(), torch.ones(2, WIDTH)
    zero = Zero("dp", 3, offload="parameters", to=sys.argv[1])
    options = {"zero": zero, "remat": Remat("blocks.*"), "bucket": 2**20, "args": (x,)}
    parallel = shardc.parallelize(model, mesh, {"x": P("dp")}, **options)
    print(*losses_of(model))
    del model
    gc.collect()
    states = STATES * sum(parameter.numel() for parameter in parallel.parameters())
    lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    now = 1024 * int(lines["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + states // TIMES, now + states // TIMES))
    print(*losses_of(parallel))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
