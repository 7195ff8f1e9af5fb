"""Task 11: rows of 32 k tokens, cut by positions, or by heads and between layers by positions; bfloat16 and remat."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P, Precision, Remat

TOKENS = 32 * 1024
POSITIONS = {"input_ids": P(None, "cp:zigzag"), "labels": P(None, "cp:zigzag")}
CUT = {"*.o_proj.weight": P(None, "tp"), "*.down_proj.weight": P(None, "tp"), "model.embed_tokens": P(None, "tp")}


def new_model(tokens):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=tokens,
        )
    )  # fmt: skip


def plans(tokens=TOKENS):
    """Bytes that a rank saves for backward, and its operations: on one device, cut, cut in bfloat16, and in a ring."""
    model, ids = new_model(tokens), torch.zeros(1, tokens, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    whole = shardc.compile(model, Mesh(one=1), kwargs=call)
    cut = shardc.compile(model, Mesh(tp=2), CUT, kwargs=call)
    ring = shardc.compile(model, Mesh(cp=4), POSITIONS, kwargs=call)
    small = cut.recompile(precision=Precision(compute=torch.bfloat16), remat=Remat("model.layers.*"))
    return [(each.memory["saved"], each.cost.flops) for each in (whole, cut, small, ring)]


def losses(tokens=TOKENS, **options):
    """The losses of two ranks and of one device."""
    model, ids = new_model(tokens), torch.randint(64, (1, tokens))
    parallel = shardc.parallelize(model, Mesh(tp=2), CUT, **options)
    return [each(input_ids=ids, labels=ids).loss for each in (parallel, model)]


if __name__ == "__main__":
    print(*plans(), sep="\n")
    with torch.no_grad():
        print(losses())
    print(losses(2048, precision=Precision(compute=torch.bfloat16), remat=Remat("model.layers.*")))
