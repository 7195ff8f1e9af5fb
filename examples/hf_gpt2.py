"""Trains the unchanged GPT-2 of transformers for a few steps: on virtual ranks, or on real ranks under torchrun.

::

    python examples/hf_gpt2.py
    torchrun --standalone --nproc-per-node 4 examples/hf_gpt2.py
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import GPT2Config, GPT2LMHeadModel

import shardc
from shardc import Mesh, P

ANNOTATIONS = {
    "input_ids": P("dp"),
    "labels": P("dp"),
    "*.attn.c_proj.weight": P("tp"),  # HF's Conv1D keeps [in, out]
    "*.mlp.c_proj.weight": P("tp"),
}


@record
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--layers", type=int, default=2)
    args = options.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=128, n_head=4, n_layer=args.layers, bos_token_id=0, eos_token_id=0
    )
    model = shardc.parallelize(GPT2LMHeadModel(config), mesh(), ANNOTATIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, ids in enumerate(batches(args.steps), 1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first_rank():
            print(f"step {step}  loss {loss.item():.4f}")
    leave()


def mesh() -> Mesh | DeviceMesh:
    """A mesh of virtual ranks, or of an even number of torchrun's ranks, with two ranks along tp."""
    if "WORLD_SIZE" not in os.environ:
        return Mesh(dp=2, tp=2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))


def batches(count: int) -> Tensor:
    """Bytes of English text, ``[count, 8, 64]``; every rank passes the same global batch."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.tensor(list(text[: count * 8 * 64])).view(count, 8, 64)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def leave() -> None:
    """End a job without the interpreter's clean-up, during which threads of gloo sometimes crash."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
