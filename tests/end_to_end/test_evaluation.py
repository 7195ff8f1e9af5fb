"""Decoders of transformers with default flags, under ``no_grad``: logits, losses and the cache are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import shardc
from shardc import Mesh, P

TOKENS: dict[str, int] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32, **TOKENS))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, vocab_size=64, **sizes, **TOKENS))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes, **TOKENS))


@pytest.mark.parametrize("make", [gpt2, llama, t5])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forward_with_the_default_flags_equals_one_device(
    make: Callable[[], nn.Module], context: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(1, 64, (4, 7))
    inputs = {"input_ids": ids, "labels": ids}
    with context():
        wanted = model(**inputs)
        parallel = shardc.parallelize(
            model, Mesh(dp=2, tp=2), {"input_ids": P("dp"), "labels": P("dp"), "*.weight": P("tp")}
        )
        found = parallel(**inputs)
    assert (found.loss - wanted.loss).abs() < 1e-5  # transformers computes losses and norms in float32
    assert (found.logits - wanted.logits).abs().max() < 1e-5
    assert type(found.past_key_values) is type(wanted.past_key_values)
