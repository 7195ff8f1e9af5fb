"""Task 7: a plan for a Llama of 7 B parameters on 16 GPUs in two nodes; no weights, no GPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Precision


def main(layers=32, **fix):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))  # the default sizes are those of Llama 2 7B
        ids = torch.zeros(64, 4096, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    fix = {"precision": Precision(), "pipeline": None} | fix
    [plan] = shardc.suggest(
        model, 16, kwargs=call, device="h100", nodes=2, links=("nvlink", "infiniband"), top=1, fix=fix
    )
    return sum(each.numel() for each in model.parameters()), plan


if __name__ == "__main__":
    parameters, plan = main()
    print(f"{parameters / 1e9:.1f} B parameters: {plan.summary()}", plan.text(), *plan.reasons, sep="\n")
