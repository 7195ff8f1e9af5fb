"""Further models of the zoo: other mixtures of experts, latent attention, alibi, speech, and images within text."""

from __future__ import annotations

import torch
import transformers as hf

from .models import BART, COLUMNS, ROWS, Made, Sizes, common, grouped, images, masked, model, text

ATTENTION = {"*.self_attn.[qkv]_proj.weight": ROWS, "lm_head.weight": ROWS}


@model
def bloom(at: Sizes) -> Made:
    config = hf.BloomConfig(vocab_size=at.vocab, hidden_size=at.width, n_layer=at.layers, n_head=at.heads)
    weights = {"*.query_key_value.weight": ROWS, "*.dense_h_to_4h.weight": ROWS, "lm_head.weight": ROWS}
    return hf.BloomForCausalLM(config), masked(at), weights


@model
def gpt_oss(at: Sizes) -> Made:
    config = hf.GptOssConfig(
        **grouped(at), head_dim=8, num_local_experts=at.experts, num_experts_per_tok=2, sliding_window=4
    )
    return hf.GptOssForCausalLM(config), text(at), ATTENTION | {"*.experts.*_proj": ROWS}


@model
def deepseek_v3(at: Sizes) -> Made:
    experts = {"n_routed_experts": at.experts, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    own = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = hf.DeepseekV3Config(
        **common(at),
        **experts,
        **own,
        num_key_value_heads=at.heads,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    weights = {"*.self_attn.q_b_proj.weight": ROWS, "*.self_attn.kv_b_proj.weight": ROWS}
    return (
        hf.DeepseekV3ForCausalLM(config),
        text(at),
        weights | {"*.experts.gate_up_proj": COLUMNS, "lm_head.weight": ROWS},
    )


@model
def beit(at: Sizes) -> Made:
    config = hf.BeitConfig(
        hidden_size=at.width,
        intermediate_size=2 * at.width,
        num_hidden_layers=at.layers,
        num_attention_heads=at.heads,
        image_size=16,
        patch_size=4,
        num_labels=10,
        use_relative_position_bias=True,
    )
    return hf.BeitForImageClassification(config), images(at), BART


@model
def wav2vec2(at: Sizes) -> Made:
    own = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": at.heads}
    sizes = {name: value for name, value in common(at).items() if name != "max_position_embeddings"}
    config = hf.Wav2Vec2Config(**sizes, **own, **positions, apply_spec_augment=False)
    inputs = {"input_values": torch.randn(at.batch, 160), "labels": torch.randint(2, (at.batch,))}
    weights = {"*.[qkv]_proj.weight": ROWS, "*.intermediate_dense.weight": ROWS}
    return hf.Wav2Vec2ForSequenceClassification(config), inputs, weights


@model
def llava(at: Sizes) -> Made:
    """Four tokens of each text stand for an image."""
    vision = {"hidden_size": at.width, "intermediate_size": 2 * at.width, "num_hidden_layers": at.layers}
    vision |= {"num_attention_heads": at.heads, "image_size": 8, "patch_size": 4}
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**grouped(at)), vision_config=hf.CLIPVisionConfig(**vision), image_token_index=3
    )
    ids = torch.randint(4, at.vocab, (at.batch, at.seq + 4))
    ids[:, 1:5] = 3
    inputs = {"input_ids": ids, "pixel_values": torch.randn(at.batch, 3, 8, 8), "labels": ids.clone()}
    weights = {"*.[qkv]_proj.weight": ROWS, "*.up_proj.weight": ROWS}
    return hf.LlavaForConditionalGeneration(config), inputs, weights
