"""Train a GPT from files: its parameters, gradients and Adam states take many times the memory of its process.

::

    python benchmarks/offload.py --limit 700 --times 6

Two processes train a model with ``Zero(offload="parameters", to=FOLDER)`` under a memory limit: in one the optimizer
steps after backward, in the other during backward (``shardc.step_in_backward``). Two more train without a limit: one
with the same plan in memory, one in plain torch. The limit holds for all private memory of the process
(``RLIMIT_DATA``), including torch itself; as root under Linux also for the file pages that it has in memory (a
``memory`` cgroup). Prints the losses, and for each way the seconds of its fastest step but the first, the bytes that
this step reads from disk and writes to disk, and the private memory after the last step. ``bound``: the larger of the
step in memory and of the time of these bytes at the rates of the disk, which are measured at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.language.text import table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import DATA, GPT, Config

MB = 10**6
CGROUPS = Path("/sys/fs/cgroup/memory")
LAYER, STATES = 12, 16  # parameters of a layer by width squared; bytes of a parameter, its gradient and Adam's states
POSITIONS, VOCABULARY = 128, 2048
RATE = 512 * MB  # bytes of the file that measures the disk
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # else glibc raises this threshold, and keeps large free blocks


def main() -> None:
    """Train in every way, and print times, bytes and losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=700, help="MB of memory of the process")
    parser.add_argument("--times", type=float, default=6, help="states of the model, in limits")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help=f"of {POSITIONS} tokens, in a batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--way", choices=[*WAYS], help="run one way alone, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(WAYS[arguments.way](arguments)))
        return
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        torch.manual_seed(0)
        model = GPT(config(arguments))
        count = sum(parameter.numel() for parameter in model.parameters())
        save_file(model.state_dict(), work / "model.safetensors")
        del model
        found = {way: _run(way, arguments, work) for way in WAYS}
        read, write = _rates(work)
    finally:
        shutil.rmtree(work)
    plain, files, stepping = found["plain torch"], found["after backward"], found["in backward"]
    states, limit = STATES * count, arguments.limit * MB
    size = f"{states / MB:.0f} MB of states, {states / limit:.1f} times {limit / MB:.0f} MB"
    print(f"{count / 1e6:.0f} million parameters: {size}")
    print("limits", *files["limits"])
    differences = [abs(a - b) for a, b in zip(plain["losses"], files["losses"], strict=True)]
    print("losses", *(f"{loss:.6f}" for loss in files["losses"]), f"differ by at most {max(differences):.1e}")
    print("stepped in backward they", "are the same" if stepping["losses"] == files["losses"] else "DIFFER")
    print(f"disk: {read / MB:.0f} MB/s read, {write / MB:.0f} MB/s written")
    print(f"device: {files['predicted'] / MB:.0f} MB at the peak, as predicted for tensors")
    header, rows = ["way", "s a step", "of bound", "MB read", "MB written", "private MB at the end"], []
    for way, each in found.items():
        bound = max(found["in memory"]["seconds"], each["read"] / read + each["written"] / write)
        numbers = (each["read"] / MB, each["written"] / MB, each["private"] / MB)
        rows.append(
            [way, f"{each['seconds']:.2f}", f"{each['seconds'] / bound:.2f}", *(f"{one:.0f}" for one in numbers)]
        )
    print(table(header, rows), end="")


def config(arguments: argparse.Namespace) -> Config:
    """A model whose states are about ``times`` limits of memory: the number of layers is chosen accordingly."""
    count = arguments.times * arguments.limit * MB / STATES - 2 * VOCABULARY * arguments.width
    layers = -(-count // (LAYER * arguments.width**2))
    return Config(
        layers=int(layers), width=arguments.width, heads=arguments.width // 64, vocab=VOCABULARY, context=POSITIONS
    )


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, POSITIONS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _run(way: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run a way in a process of its own; returns its measurements."""
    command = [sys.executable, __file__, "--way", way, "--folder", str(work)]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("limit", "times", "width", "rows", "steps")]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | MALLOC).stdout
    result: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return result


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in plain torch."""
    from safetensors.torch import load_file

    model = GPT(config(arguments))
    model.load_state_dict(load_file(Path(arguments.folder) / "model.safetensors"))
    return _train(model, arguments.steps, arguments.rows)


def planned(arguments: argparse.Namespace, in_files: bool, stepping: bool = False) -> dict[str, Any]:
    """Train with a plan, from files under the limit or in memory. ``stepping``: the optimizer steps in backward."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = GPT(config(arguments))
    zero = shardc.Zero("dp", 3)
    if in_files:
        zero = shardc.Zero("dp", 3, offload="parameters", to=arguments.folder)
    with _limited(arguments.limit * MB if in_files else None) as limits:
        options = {"weights": arguments.folder, "args": batch(arguments.rows), "remat": shardc.Remat("blocks.*")}
        options["bucket"] = 1  # a bucket would hold 25 MB of gradients
        parallel = shardc.parallelize(model, mesh, DATA, zero=zero, **options)
        found = _train(parallel, arguments.steps, arguments.rows, stepping)
    dist.destroy_process_group()
    return {**found, "limits": limits, "predicted": parallel.shardc.program.memory["peak"]}


def _train(model: nn.Module, steps: int, rows: int, stepping: bool = False) -> dict[str, Any]:
    """Train; returns the losses, and of the fastest step but the first the seconds and the bytes read and written."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds, moved = [], [], []
    for _ in range(steps):
        start, before = time.perf_counter(), _moved()
        loss = model(*batch(rows))
        if stepping:
            with shardc.step_in_backward(model, optimizer):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        moved.append([now - then for now, then in zip(_moved(), before, strict=True)])
    fastest = min(range(1, steps), key=seconds.__getitem__)
    read, written = moved[fastest]
    return {"losses": losses, "seconds": seconds[fastest], "read": read, "written": written, "private": _private()}


def _moved() -> tuple[int, int]:
    """Bytes that the process has read from the disk and has written to it."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _private() -> int:
    """The current private bytes of the process, as ``RLIMIT_DATA`` counts them."""
    lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return 1024 * int(lines["VmData"].split()[0])


@contextmanager
def _limited(nbytes: int | None) -> Iterator[list[str]]:
    """Limit the memory of this process unless ``nbytes`` is None; yields the names of the limits."""
    if nbytes is None:
        yield []
        return
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    limits, group = ["RLIMIT_DATA"], CGROUPS / f"shardc-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        limits.append("cgroup")
    except OSError:
        yield limits
        return
    try:
        yield limits
    finally:
        (CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _rates(work: Path) -> tuple[float, float]:
    """Bytes a second that the disk reads and writes, without the page cache."""
    path = work / "disk"
    size = ["bs=1M", f"count={RATE // 2**20}"]
    write = _seconds(["dd", "if=/dev/zero", f"of={path}", "oflag=direct", *size])
    read = _seconds(["dd", f"if={path}", "of=/dev/null", "iflag=direct", *size])
    return RATE / read, RATE / write


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


WAYS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "plain torch": plain,
    "in memory": partial(planned, in_files=False),
    "after backward": partial(planned, in_files=True),
    "in backward": partial(planned, in_files=True, stepping=True),
}

if __name__ == "__main__":
    main()
