"""Task 8: a pipeline of two stages with ZeRO inside them; under torchrun with one stage on each rank."""

import os

import torch
from gpt import GPT, Config
from hf_gpt2 import is_first_rank, leave
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Mesh, P, Pipeline, Zero

CONFIG = Config(vocab=64, context=16, layers=4, heads=2, width=32, tied=True)


def make_mesh():
    if "WORLD_SIZE" not in os.environ:
        return Mesh(pp=2, dp=2)
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]), 1), mesh_dim_names=("pp", "dp"))


def train(model, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(*args)
        loss.backward()
        if hasattr(model, "shardc"):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    model, args = GPT(CONFIG), tuple(torch.randint(64, (2, 10, 16)))
    annotations, pipeline = {"ids": P("dp"), "targets": P("dp")}, Pipeline("pp", microbatches=4)
    piped = shardc.parallelize(model, make_mesh(), annotations, pipeline=pipeline, zero=Zero("dp", 1), args=args)
    return train(piped, args), train(model, args)


if __name__ == "__main__":
    result = main()
    if is_first_rank():
        print(*result, sep="\n")
    leave()
