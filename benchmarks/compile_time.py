"""Compile time: GPT-2 small on dp=2,tp=4, and a two-layer model for 2 and for 2048 ranks.

    python benchmarks/compile_time.py            # needs the hf extra

The two mesh sizes are compiled in turn, so that a change of the machine's speed affects both; the ratio is of medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardc
from shardc import Mesh, P

ROUNDS = 7
DATA = {"input_ids": P("dp"), "labels": P("dp")}
MEGATRON = {"*.attn.c_proj.weight": P("tp"), "*.mlp.c_proj.weight": P("tp")}
VOCABULARY = {"*.wte.weight": P("tp")}
BATCH = {"input_ids": P(("dp", "tp")), "labels": P(("dp", "tp"))}


def gpt2(layers: int) -> nn.Module:
    """GPT-2 small with ``layers`` layers, on meta."""
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=layers)).train()


def compiled(model: nn.Module, mesh: Mesh, annotations: Mapping[str, P], batch: int, length: int) -> shardc.Compiled:
    """The model compiled for a training step on tokens of ``[batch, length]``."""
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return shardc.compile(model, mesh, annotations, kwargs={"input_ids": ids, "labels": ids})


def seconds_of(model: nn.Module, ranks: int) -> tuple[float, int]:
    """Seconds to compile for dp=ranks/2,tp=2 at 16 rows a rank, and the number of graph nodes."""
    start = time.perf_counter()
    found = compiled(model, Mesh(dp=ranks // 2, tp=2), DATA | MEGATRON, 16 * ranks, 128)
    return time.perf_counter() - start, len(found.graph.nodes)


def report(name: str, annotations: Mapping[str, P]) -> None:
    """Print the costs of GPT-2 small under a plan: compile time, bytes on the wire, redundant operations."""
    begun = time.process_time()
    mesh = Mesh(dp=2, tp=4)
    full = compiled(gpt2(12), mesh, annotations, 16, 1024)
    busy = time.process_time() - begun
    print(f"GPT-2 small, T=1024, B=16, dp=2,tp=4, {name}:")
    print(f"  {sum(full.seconds.values()):.1f} s to compile, {busy:.1f} s of them computed here; slowest first:")
    slowest = sorted(full.seconds.items(), key=lambda each: -each[1])
    print("  " + ", ".join(f"{name} {took:.2f}" for name, took in slowest))
    wire = sum(each.wire_bytes for each in full.collectives)
    flops = json.loads(full.dump(format="json"))["flops"]
    print(f"  {len(full.collectives)} collectives, {wire / 2**20:.0f} MiB on the wire a rank, a step")
    print(f"  {flops['per_rank'] * mesh.size / flops['whole']:.5f} times the operations of one device")


def main() -> None:
    """Print the report of each plan, and the compile times of both mesh sizes."""
    report("batch over both axes", BATCH)
    report("batch over dp, Megatron over tp", DATA | MEGATRON | VOCABULARY)
    model = gpt2(2)
    seconds_of(model, 2)
    pairs = [(seconds_of(model, 2), seconds_of(model, 2048)) for _ in range(ROUNDS)]
    small, large = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    few, many = (pairs[0][i][1] for i in (0, 1))
    print(f"2 layers for 2 ranks: {small:.2f} s, {few} nodes; for 2048: {large:.2f} s, {many} nodes")
    print(f"  ratio of medians {large / small:.2f}")


if __name__ == "__main__":
    main()
