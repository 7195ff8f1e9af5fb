"""Task 5: LoRA with peft; the adapter is saved, and plain peft reads it."""

import tempfile

import torch
from llama import ANNOTATIONS, SIZES, train
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh


def main():
    torch.manual_seed(0)
    config, ids = LlamaConfig(**SIZES | {"num_hidden_layers": 1}), torch.randint(128, (8, 16))
    base = LlamaForCausalLM(config).state_dict()

    def new_base():
        model = LlamaForCausalLM(config)
        model.load_state_dict(base)
        return model

    model = get_peft_model(new_base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=2), ANNOTATIONS)
    losses = train(parallel, ids), train(model, ids)
    folder = tempfile.mkdtemp()
    parallel.save_pretrained(folder)
    reread = PeftModel.from_pretrained(new_base(), folder)
    with torch.no_grad():
        after = [each(input_ids=ids, labels=ids).loss.item() for each in (reread, model)]
    return *losses, after


if __name__ == "__main__":
    print(*main(), sep="\n")
