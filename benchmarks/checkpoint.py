"""Seconds to save and to load 1 GB on two ranks, compared with ``torch.distributed.checkpoint`` in one run.

::

    python benchmarks/checkpoint.py --folder /dev/shm --rounds 5
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardc
from shardc.runtime.comm.launch import launch

RANKS = 2


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024, help="of all ranks together")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
        rows = launch(measure, RANKS, folder, arguments.rounds, arguments.megabytes, timeout=3600)[0]
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.megabytes} MB on {RANKS} ranks in {arguments.folder}, medians of {arguments.rounds}")
    print(f"{'':8}{'shardc s':>10}{'torch s':>10}{'ratio':>8}")
    for what in ("save", "load"):
        own, other = (statistics.median(rows[name, what]) for name in ("shardc", "torch"))
        print(f"{what:8}{own:10.2f}{other:10.2f}{own / other:8.2f}")


def measure(folder: str, rounds: int, megabytes: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of the slowest rank in each round, by library and task; all tasks take turns."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    model = nn.Module()
    for i in range(16):
        whole = torch.full((megabytes // 16, 2**18), float(i))
        model.register_parameter(f"p{i}", nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    tasks: dict[tuple[str, str], Callable[[str], Any]] = {
        ("shardc", "save"): lambda path: shardc.save(path, model, step=0),
        ("shardc", "load"): lambda path: shardc.load(path, model),
        ("torch", "save"): lambda path: save(model.state_dict(), checkpoint_id=path),
        ("torch", "load"): lambda path: load(model.state_dict(), checkpoint_id=path),
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    for number in range(rounds + 1):
        for key, task in tasks.items():
            dist.barrier()
            begin = time.perf_counter()
            task(f"{folder}/{key[0]}")
            dist.barrier()
            if number:  # the first round warms up
                seconds[key].append(time.perf_counter() - begin)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in Path(folder).iterdir():
                shutil.rmtree(path)
    return seconds


if __name__ == "__main__":
    main()
