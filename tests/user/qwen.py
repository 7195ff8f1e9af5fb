"""Task 4: models like Qwen: biases of q, k and v, norms of heads, a tied head, and heads that tp does not divide."""

import torch
from llama import ANNOTATIONS, SIZES, train
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shardc
from shardc import Mesh


def main():
    torch.manual_seed(0)
    ids, sizes = torch.randint(128, (8, 16)), SIZES | {"num_hidden_layers": 1}
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    results = []
    for model, mesh in ((qwen2, Mesh(dp=2, tp=2)), (qwen3, Mesh(dp=1, tp=4))):  # two key heads on four ranks
        parallel = shardc.parallelize(model, mesh, ANNOTATIONS)
        results.append((train(parallel, ids), train(model, ids)))
    return results


if __name__ == "__main__":
    print(*main(), sep="\n")
