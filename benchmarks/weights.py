"""Memory, bytes and seconds of a rank that loads a transformers folder into a model on meta: shardc and torch's ways.

::

    python benchmarks/weights.py --rounds 5

Every way loads in its own processes, on ranks that have joined a job and have loaded a tiny model, so that all code is
loaded; ``once`` is the memory that this takes. Then a rank loads the model and writes to every parameter, as an
optimizer does: until then some ways leave parameters in the memory map of a file. Columns in MB, of the largest rank:

- ``peak``: the most memory of the process beyond what it had before, by the kernel's high-water mark (``VmHWM``). It
  counts pages of mapped files, though these belong to the page cache and can be evicted. ``anonymous`` and ``file``:
  the most memory of each kind (``RssAnon``, ``RssFile``), sampled by a thread every 2 ms.
- ``bound``: the bytes that the rank stores, and 1.2 times the largest tensor.
- ``disk``: bytes that all ranks together read from the disk, starting with an empty page cache. ``read``: bytes that a
  rank reads by calls of ``read``, without memory maps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import shardc
from shardc import Mesh, P, Zero
from shardc.runtime.comm.launch import launch

RANKS = 4
MB = 1e6
SIZES: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
TINY: dict[str, Any] = {**SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the model is written, on a disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS])
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        for name, sizes in (("model", SIZES), ("tiny", TINY)):
            LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(work / name, max_shard_size="80MB")
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
        for _ in range(arguments.rounds):
            for way in arguments.ways:
                rows[way].append(round_of(work, way))
    finally:
        shutil.rmtree(work)
    print_table(rows)


def round_of(work: Path, way: str) -> dict[str, float]:
    """The figures of a way: each from the rank with the most, and ``disk`` the sum over ranks."""
    for path in work.glob("model/*"):
        forget(path)
    ranks = launch(measure, RANKS, str(work), way, timeout=600)
    found = {name: max(each[name] for each in ranks) for name in ranks[0]}
    return {**found, "disk": sum(each["disk"] for each in ranks)}


def forget(path: Path) -> None:
    """Evict a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def print_table(rows: dict[str, list[dict[str, float]]]) -> None:
    """Print medians of the rounds, and the bound."""
    first = next(iter(rows.values()))[0]
    model, largest = first["model"] / MB, first["largest"] / MB
    print(f"{model:.0f} MB on {RANKS} ranks, the largest tensor {largest:.0f} MB; medians of the rounds, in MB")
    names = ("stored", "peak", "anonymous", "file", "once", "disk", "read")
    print(f"{'':24}" + "".join(f"{name:>11}" for name in names) + f"{'bound':>9}{'seconds':>9}")
    for way, found in rows.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        bound = (middle["stored"] + 1.2 * middle["largest"]) / MB
        seconds = f"{middle['seconds']:9.2f}"
        print(f"{way:24}" + "".join(f"{middle[name] / MB:11.0f}" for name in names) + f"{bound:9.0f}" + seconds)
    print(json.dumps(rows))


# One rank.


def measure(work: str, way: str) -> dict[str, float]:
    """Seconds, memory and bytes that this rank takes to load a model."""
    torch.set_num_threads(1)
    load, folder = WAYS[way], Path(work)
    alone = settled()
    load(folder / "tiny")
    dist.barrier()
    begin, counts = settled(), counters()
    Path("/proc/self/clear_refs").write_text("5")
    watch, start = Watch(), time.perf_counter()
    with watch:
        model = load(folder / "model")
        own = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        own = [each.detach() for each in own if not each.is_meta]
        for each in own:
            each.mul_(1)
        dist.barrier()
    seconds, after = time.perf_counter() - start, counters()
    whole = [each.numel() * each.itemsize for each in model.parameters()]
    if own:
        check(model, folder / "model")
    return {
        "seconds": seconds, "stored": sum(each.nbytes for each in own), "largest": max(whole), "model": sum(whole),
        "peak": watch.end["VmHWM"] - begin["VmRSS"], "anonymous": watch.most["RssAnon"] - begin["RssAnon"],
        "file": watch.most["RssFile"] - begin["RssFile"], "disk": after["read_bytes"] - counts["read_bytes"],
        "read": after["rchar"] - counts["rchar"], "once": begin["VmRSS"] - alone["VmRSS"],
    }  # fmt: skip


def settled() -> dict[str, int]:
    """``memory`` after all free memory has been returned to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def memory() -> dict[str, int]:
    """Bytes of memory of this process, by the kernel's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines)
            if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}  # fmt: skip


def counters() -> dict[str, int]:
    """Counters of the bytes that this process has read and written, by the kernel's names."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(text) for name, _, text in (line.partition(":") for line in lines)}


class Watch:
    """The most memory of each kind within a block, and the memory at its end."""

    def __init__(self) -> None:
        self.most, self.end = memory(), dict[str, int]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            now = memory()
            self.most = {name: max(self.most[name], each) for name, each in now.items()}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = memory()
        self._is_over.set()
        self._thread.join()


def check(model: nn.Module, folder: Path) -> None:
    """Compare some of the parameters with those of the folder."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, each in list(model.named_parameters())[::7]:
        with safe_open(folder / places[name], "pt") as file:
            whole = file.get_tensor(name)
        found = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(found, whole), name


# Ways to load.

PLAN = {"input_ids": P("dp"), "labels": P("dp")}


def skeleton(folder: Path) -> nn.Module:
    """The model of a folder, on meta."""
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    return model


def by_shardc(folder: Path) -> nn.Module:
    """Load by shardc with ZeRO 3, compiled for a batch."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    return shardc.parallelize(skeleton(folder), mesh, PLAN, kwargs=batch(), zero=Zero("dp", 3), weights=folder)


def by_compile(folder: Path) -> nn.Module:
    """Only compile as ``by_shardc`` does, without weights."""
    model = skeleton(folder)
    model.program = [shardc.compile(model, Mesh(dp=RANKS), PLAN, kwargs=batch(), zero=Zero("dp", 3))]  # type: ignore
    return model


def batch() -> dict[str, torch.Tensor]:
    """A batch of one row a rank."""
    ids = torch.zeros(RANKS, 64, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def by_fsdp(folder: Path) -> nn.Module:
    """Load by FSDP2: the first rank reads the whole model and sends it."""
    model = skeleton(folder)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    state = LlamaForCausalLM.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def by_transformers(**sizes: Any) -> Callable[[Path], nn.Module]:
    """A function that loads by ``from_pretrained`` with a plan of transformers."""

    def load(folder: Path) -> nn.Module:
        config = DistributedConfig(**sizes)
        model: nn.Module = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
        return model

    return load


WAYS: dict[str, Callable[[Path], nn.Module]] = {
    "shardc zero3": by_shardc,
    "shardc, compile alone": by_compile,
    "FSDP2, broadcast": by_fsdp,
    "from_pretrained, fsdp": by_transformers(fsdp_size=RANKS),
    "from_pretrained, tp": by_transformers(tp_plan="auto", tp_size=RANKS),
}

if __name__ == "__main__":
    main()
