"""Trains a Llama of transformers on rows cut by positions over ranks; prints the memory and the traffic of a rank.

::

    python examples/long_context.py
    torchrun --standalone --nproc-per-node 4 examples/long_context.py
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from collections import Counter

import torch
from pipeline import leave, say
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P

POSITIONS = {"input_ids": P(None, "cp"), "labels": P(None, "cp")}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--length", type=int, default=2048, help="tokens of a row")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--attention", default="ring", help="ring, ulysses, gather, or auto for what sends least")
    args = options.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=args.length,
    )  # fmt: skip
    alone, rows = LlamaForCausalLM(config), batches(args.steps, args.length)
    model = shardc.parallelize(alone, mesh(), POSITIONS, attention=args.attention)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, alone))
    for step, ids in enumerate(rows, 1):
        loss, expected = train(model, optimizer, ids), train(alone, other, ids)
        say(f"step {step}  loss {loss:.4f}, on one device {expected:.4f}")

    calls = {"input_ids": rows[0], "labels": rows[0]}
    whole = shardc.compile(alone, Mesh(cp=1), kwargs=calls)
    saved, peak = (f"{model.program.memory[name] / whole.memory[name]:.0%}" for name in ("saved", "peak"))
    say(f"a rank saves {saved} of what one device saves for backward, and holds {peak} of its peak")
    sent = Counter[str]()
    for each in model.program.collectives:
        sent[f"{each.kind} in {each.phase}"] += each.wire_bytes
    for kind, count in sent.items():
        say(f"{count:>9,} bytes that a rank sends by {kind}")
    leave()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """Take a training step; returns its loss."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mesh() -> Mesh | DeviceMesh:
    """Four virtual ranks, or the ranks of torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return Mesh(cp=4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))


def batches(count: int, length: int) -> Tensor:
    """Bytes of English text, ``[count, 1, length]``."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.tensor(list(text[: count * length])).view(count, 1, length)


if __name__ == "__main__":
    main()
