"""The models of the zoo, with few annotations: small models of transformers, convolutional and recurrent ones.

A maker takes the sizes and returns ``(model, inputs by name, annotations for tp)``; ``dp`` cuts the batch dim of every
input. The annotations are Megatron's: they cut the weights of queries, keys, values and the first layer of the MLP by
columns, and the head by the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from shardc import P

Inputs = dict[str, Any]
Made = tuple[nn.Module, Inputs, Mapping[str, P]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model; ``width`` is ``8 * heads``."""

    batch: int = 4
    seq: int = 8
    vocab: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 4

    @property
    def width(self) -> int:
        return 8 * self.heads


Maker = Callable[[Sizes], Made]
MODELS: dict[str, Maker] = {}
ROWS = P("tp")  # nn.Linear holds its weight as [out, in]
COLUMNS = P(None, "tp")
LLAMA = {
    "model.layers.*.self_attn.[qkv]_proj.weight": ROWS,
    "model.layers.*.mlp.up_proj.weight": ROWS,
    "lm_head.weight": ROWS,
}
FUSED = {
    "model.layers.*.self_attn.qkv_proj.weight": ROWS,
    "model.layers.*.mlp.gate_up_proj.weight": ROWS,
    "lm_head.weight": ROWS,
}
BERT = {
    "*.attention.self.query.weight": ROWS,
    "*.attention.self.key.weight": ROWS,
    "*.attention.self.value.weight": ROWS,
    "*.intermediate.dense.weight": ROWS,
}
BART = {"*.[qkv]_proj.weight": ROWS, "*.fc1.weight": ROWS}


def model(make: Maker) -> Maker:
    """Register a maker in the zoo under its own name."""
    MODELS[make.__name__] = make
    return make


def tokens(at: Sizes) -> Tensor:
    return torch.randint(at.vocab, (at.batch, at.seq))


def text(at: Sizes) -> Inputs:
    return {"input_ids": tokens(at), "labels": tokens(at)}


def images(at: Sizes, size: int = 16) -> Inputs:
    return {"pixel_values": torch.randn(at.batch, 3, size, size), "labels": torch.randint(10, (at.batch,))}


def common(at: Sizes) -> dict[str, int]:
    """The fields that most configs share."""
    return {
        "vocab_size": at.vocab,
        "hidden_size": at.width,
        "intermediate_size": 2 * at.width,
        "num_hidden_layers": at.layers,
        "num_attention_heads": at.heads,
        "max_position_embeddings": 32,
    }


def grouped(at: Sizes) -> dict[str, int]:
    """The fields of a config in which two queries share a key, if the number of heads is even."""
    return common(at) | {"num_key_value_heads": at.heads // 2 if at.heads % 2 == 0 else at.heads}


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_layer": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


def gpt_config(at: Sizes) -> dict[str, int]:
    return {**GPT, "vocab_size": at.vocab, "n_embd": at.width, "n_head": at.heads}


# Decoders.


@model
def gpt2(at: Sizes) -> Made:
    weights = {"*.attn.c_attn.weight": COLUMNS, "*.mlp.c_fc.weight": COLUMNS, "lm_head.weight": ROWS}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**gpt_config(at))), text(at), weights


@model
def gptj(at: Sizes) -> Made:
    config = hf.GPTJConfig(**gpt_config(at), rotary_dim=4)
    weights = {"*.attn.[qkv]_proj.weight": ROWS, "*.mlp.fc_in.weight": ROWS, "lm_head.weight": ROWS}
    return hf.GPTJForCausalLM(config), text(at), weights


@model
def gpt_neox(at: Sizes) -> Made:
    weights = {"*.query_key_value.weight": ROWS, "*.dense_h_to_4h.weight": ROWS, "lm_head.weight": ROWS}
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**common(at))), text(at), weights


@model
def llama(at: Sizes) -> Made:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped(at))), text(at), LLAMA


@model
def mistral(at: Sizes) -> Made:
    return hf.MistralForCausalLM(hf.MistralConfig(**grouped(at), sliding_window=4)), text(at), LLAMA


@model
def qwen2(at: Sizes) -> Made:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped(at))), text(at), LLAMA


@model
def qwen3(at: Sizes) -> Made:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped(at), head_dim=8)), text(at), LLAMA


@model
def gemma2(at: Sizes) -> Made:
    config = hf.Gemma2Config(**grouped(at), head_dim=8, sliding_window=4)
    return hf.Gemma2ForCausalLM(config), text(at), LLAMA


@model
def phi3(at: Sizes) -> Made:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**common(at), **SPECIAL)), text(at), FUSED


@model
def falcon(at: Sizes) -> Made:
    weights = {"*.query_key_value.weight": ROWS, "*.dense_h_to_4h.weight": ROWS, "lm_head.weight": ROWS}
    config = hf.FalconConfig(**common(at), new_decoder_architecture=True, num_kv_heads=at.heads)
    return hf.FalconForCausalLM(config), text(at), weights


@model
def opt(at: Sizes) -> Made:
    own = {"ffn_dim": 2 * at.width, "word_embed_proj_dim": at.width}
    return hf.OPTForCausalLM(hf.OPTConfig(**common(at), **own)), text(at), BART | {"lm_head.weight": ROWS}


@model
def mixtral(at: Sizes) -> Made:
    """Mixtral with the hidden units of each expert cut, like those of an MLP."""
    config = hf.MixtralConfig(**grouped(at), num_local_experts=at.experts, output_router_logits=True)
    weights = {"*.experts.gate_up_proj": COLUMNS, "*.[qkv]_proj.weight": ROWS, "lm_head.weight": ROWS}
    return hf.MixtralForCausalLM(config), text(at), weights


@model
def mixtral_experts(at: Sizes) -> Made:
    """Mixtral with some of the experts on each rank."""
    made, inputs, weights = mixtral(at)
    return (
        made,
        inputs,
        {name: spec for name, spec in weights.items() if "experts" not in name} | {"*.experts.*_proj": ROWS},
    )


@model
def mamba(at: Sizes) -> Made:
    own = {"hidden_size": at.width, "num_hidden_layers": at.layers, "vocab_size": at.vocab}
    config = hf.MambaConfig(**own, state_size=4, expand=2, time_step_rank=4)
    return hf.MambaForCausalLM(config), text(at), {"*.mixer.in_proj.weight": ROWS, "backbone.embeddings.weight": ROWS}


@model
def mamba2(at: Sizes) -> Made:
    own = {"hidden_size": at.width, "num_hidden_layers": at.layers, "vocab_size": at.vocab, "num_heads": 2 * at.heads}
    config = hf.Mamba2Config(**own, head_dim=8, state_size=4, expand=2, n_groups=1, chunk_size=4)
    return hf.Mamba2ForCausalLM(config), text(at), {"*.mixer.out_proj.weight": COLUMNS, "lm_head.weight": ROWS}


# Encoders, and encoders with decoders.


def masked(at: Sizes) -> Inputs:
    """Texts of different lengths."""
    return text(at) | {"attention_mask": torch.ones(at.batch, at.seq, dtype=torch.int64).tril(at.seq // 2)}


@model
def bert(at: Sizes) -> Made:
    head = {"cls.predictions.transform.dense.weight": COLUMNS, "cls.predictions.decoder.weight": ROWS}
    weights = BERT | head
    return hf.BertForMaskedLM(hf.BertConfig(**common(at))), masked(at), weights


@model
def roberta(at: Sizes) -> Made:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**common(at))), masked(at), BERT | {"lm_head.decoder.weight": ROWS}


@model
def distilbert(at: Sizes) -> Made:
    config = hf.DistilBertConfig(
        vocab_size=at.vocab, dim=at.width, hidden_dim=2 * at.width, n_layers=at.layers, n_heads=at.heads
    )
    weights = {"*.attention.[qkv]_lin.weight": ROWS, "*.ffn.lin1.weight": ROWS, "vocab_projector.weight": ROWS}
    return hf.DistilBertForMaskedLM(config), masked(at), weights


@model
def deberta(at: Sizes) -> Made:
    own = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
    weights = {"*.self.*_proj.weight": ROWS, "*.intermediate.dense.weight": ROWS}
    return hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**common(at), **own)), masked(at), weights


@model
def t5(at: Sizes) -> Made:
    own = {"vocab_size": at.vocab, "d_model": at.width, "d_kv": 8, "d_ff": 2 * at.width, "decoder_start_token_id": 0}
    config = hf.T5Config(**own, num_layers=at.layers, num_heads=at.heads)
    weights = {"*Attention.[qkv].weight": ROWS, "*.wi.weight": ROWS, "lm_head.weight": ROWS}
    return hf.T5ForConditionalGeneration(config), text(at), weights


def bart_config(at: Sizes) -> dict[str, int]:
    both = {"layers": at.layers, "attention_heads": at.heads, "ffn_dim": 2 * at.width}
    return {f"{side}_{name}": value for name, value in both.items() for side in ("encoder", "decoder")} | {
        "vocab_size": at.vocab,
        "d_model": at.width,
        "decoder_start_token_id": 1,
        **SPECIAL,
    }


@model
def bart(at: Sizes) -> Made:
    config = hf.BartConfig(**bart_config(at), max_position_embeddings=32)
    return hf.BartForConditionalGeneration(config), text(at), BART | {"lm_head.weight": ROWS}


@model
def whisper(at: Sizes) -> Made:
    own = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
    inputs = {"input_features": torch.randn(at.batch, 8, 16), "labels": tokens(at)}
    config = hf.WhisperConfig(**bart_config(at), **own)
    return hf.WhisperForConditionalGeneration(config), inputs, BART | {"proj_out.weight": ROWS}


# Images.


@model
def vit(at: Sizes) -> Made:
    config = hf.ViTConfig(**common(at), image_size=16, patch_size=4, num_labels=10)
    return hf.ViTForImageClassification(config), images(at), BART


@model
def swin(at: Sizes) -> Made:
    own = {"depths": [2, 2], "num_heads": [at.heads // 2, at.heads], "embed_dim": at.width // 2, "window_size": 2}
    config = hf.SwinConfig(**own, image_size=16, patch_size=2, num_labels=10)
    return hf.SwinForImageClassification(config), images(at), BART


@model
def clip(at: Sizes) -> Made:
    pixels = images(at)["pixel_values"]
    texts = tokens(at).clamp(max=at.vocab - 2)
    texts[:, -1] = at.vocab - 1  # the end of each text
    tower = common(at) | {"projection_dim": 16}
    config = hf.CLIPConfig(
        text_config=tower | {"eos_token_id": at.vocab - 1},
        vision_config=tower | {"image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    return hf.CLIPModel(config), {"input_ids": texts, "pixel_values": pixels, "return_loss": True}, BART
