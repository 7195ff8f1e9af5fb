"""Fine-tunes a Llama with LoRA by the Trainer of transformers: on virtual ranks, or on real ranks under torchrun.

Batches and losses are the same on any number of ranks. At the end the adapter is saved in the output folder::

    python examples/finetune_llama_lora.py
    torchrun --standalone --nproc-per-node 4 examples/finetune_llama_lora.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from hf_gpt2 import is_first_rank, leave, mesh
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardc
from shardc import P, Zero

ANNOTATIONS = {
    "input_ids": P("dp"),
    "*.[qv]_proj.base_layer.weight": P("tp"),
    "*.k_proj.weight": P("tp"),
    "*.o_proj.weight": P(None, "tp"),
    "*.gate_proj.weight": P("tp"),
    "*.up_proj.weight": P("tp"),
    "*.down_proj.weight": P(None, "tp"),
}


@record
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--output", default="build/lora")
    options.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    args = options.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    llama = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
    adapted = get_peft_model(llama, LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]))
    model = shardc.parallelize(adapted, mesh(), ANNOTATIONS, zero=Zero("dp", stage=3))
    settings = TrainingArguments(
        args.output, max_steps=args.steps, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        save_steps=10, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=texts(640), eval_dataset=texts(64))
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    model.save_pretrained(args.output)  # adapter_config.json and adapter_model.safetensors; every rank calls it
    if is_first_rank():
        print(f"eval_loss {loss:.4f}")
    leave()


def texts(count: int) -> list[dict[str, Tensor]]:
    """Bytes of English text, 32 for each sample."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return [{"input_ids": ids, "labels": ids} for ids in torch.tensor(list(text[: count * 32])).view(count, 32)]


if __name__ == "__main__":
    main()
