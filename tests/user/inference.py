"""Task 12: generate tokens with a cache, on virtual ranks or under torchrun."""

import os

import torch
from hf_gpt2 import is_first_rank, leave
from llama import SIZES
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P

CUT = {"*.o_proj.weight": P(None, "tp"), "*.down_proj.weight": P(None, "tp")}


def make_mesh():
    if "WORLD_SIZE" not in os.environ:
        return Mesh(tp=2)
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    parallel, prompt = shardc.parallelize(model, make_mesh(), CUT), torch.tensor([[5, 7, 11]])
    options = {"max_new_tokens": 16, "pad_token_id": 0}
    return [each.generate(prompt, **options)[0].tolist() for each in (parallel, model)], len(parallel.shardc.variants)


if __name__ == "__main__":
    result = main()
    if is_first_rank():
        print(*result, sep="\n")
    leave()
