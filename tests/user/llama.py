"""Task 2: a Llama with tensor parallelism and ZeRO."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P, Zero

ANNOTATIONS = {
    "input_ids": P("dp"),
    "labels": P("dp"),
    "*.o_proj.weight": P(None, "tp"),
    "*.down_proj.weight": P(None, "tp"),
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def train(model, ids, steps=3):
    """Train for a few steps; returns their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(LlamaConfig(**SIZES)), torch.randint(128, (8, 16))
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=2), ANNOTATIONS, zero=Zero("dp", stage=3))
    return train(parallel, ids), train(model, ids)


if __name__ == "__main__":
    print(*main(), sep="\n")
