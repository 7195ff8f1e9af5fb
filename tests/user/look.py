"""Task 9: the report of a plan as a page and as text, and the reason of a collective. Also a target of the commands."""

import torch
from llama import ANNOTATIONS, SIZES
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh


def model():
    """A target: ``shardc dump look.py:model --mesh dp=2,tp=2 --format html -o report.html``."""
    torch.manual_seed(0)
    ids = torch.randint(128, (8, 16))
    llama = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    return llama, (), {"input_ids": ids, "labels": ids}, ANNOTATIONS


def main():
    llama, args, kwargs, annotations = model()
    program = shardc.compile(llama, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    return program.dump("html"), program.dump(only="collectives,memory"), program.explain("all_reduce_tp").text()


if __name__ == "__main__":
    print(*main()[1:], sep="\n")
