"""Task 6: load a Hugging Face folder into a model on meta, train it, and save it."""

import tempfile
from pathlib import Path

import torch
from llama import ANNOTATIONS, SIZES, train
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, Zero


def main():
    torch.manual_seed(0)
    work, ids = Path(tempfile.mkdtemp()), torch.randint(128, (8, 16))
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1})).save_pretrained(work / "in")

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work / "in"))
    parallel = shardc.parallelize(
        skeleton, Mesh(dp=2, tp=2), ANNOTATIONS, zero=Zero("dp", stage=3), weights=work / "in"
    )
    model = AutoModelForCausalLM.from_pretrained(work / "in").train()
    losses = train(parallel, ids), train(model, ids)
    parallel.save_pretrained(work / "out")
    shardc.export(work / "exported", parallel)
    weights = [AutoModelForCausalLM.from_pretrained(work / name).state_dict() for name in ("out", "exported")]
    return *losses, [*weights, model.state_dict()]


if __name__ == "__main__":
    print(*main()[:2], sep="\n")
