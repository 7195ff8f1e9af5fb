"""Task 3: a model like Mixtral, with each expert cut over tp, or with whole experts spread over dp."""

import torch
from llama import SIZES, train
from transformers import MixtralConfig, MixtralForCausalLM

import shardc
from shardc import Mesh, P

DATA = {"input_ids": P("dp"), "labels": P("dp")}
INSIDE = DATA | {"*.o_proj.weight": P(None, "tp"), "*.experts.down_proj": P(None, None, "tp")}
WHOLE = DATA | {"*.experts.*_proj": P("dp")}


def main():
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_local_experts=4, output_router_logits=True)
    model, ids = MixtralForCausalLM(config), torch.randint(128, (8, 16))
    inside = shardc.parallelize(model, Mesh(dp=2, tp=2), INSIDE)
    whole = shardc.parallelize(model, Mesh(dp=4), WHOLE)
    return train(inside, ids), train(whole, ids), train(model, ids)


if __name__ == "__main__":
    print(*main(), sep="\n")
