"""``generate`` of a parallel module gives the tokens of one device, and its programs are few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from hf_models import COLUMNS, GATED, ROWS, SIZES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import shardc
from shardc import Mesh, P, ShardingError

HEADS = {f"*.{name}_proj.weight": COLUMNS for name in "qkv"} | {"*.o_proj.weight": ROWS}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=128, n_positions=64))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gemma2() -> PreTrainedModel:
    """Half of its layers see the last six positions alone."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=6))


def t5() -> PreTrainedModel:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=128, decoder_start_token_id=0))


def bart() -> PreTrainedModel:
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder")
              for name, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return BartForConditionalGeneration(BartConfig(**layers, vocab_size=128, d_model=32, max_position_embeddings=64))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, P], int]] = {
    "llama": (llama, {**GATED, **HEADS, "lm_head.weight": COLUMNS}, 2),
    "gpt2": (gpt2, {"*.c_fc.weight": ROWS, "*.mlp.c_proj.weight": COLUMNS}, 2),
    "mixtral": (mixtral, {"*.experts.gate_up_proj": P("tp"), "*.experts.down_proj": P("tp")}, 2),
    "gemma2": (gemma2, GATED, 2),
    "t5": (t5, {"*.wi.weight": COLUMNS, "*.wo.weight": ROWS}, 3),
    "bart": (bart, {"*.fc1.weight": COLUMNS, "*.fc2.weight": ROWS}, 3),
}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True}, "beams": {"num_beams": 3}}


def prompt(rows: int = 2) -> Tensor:
    return torch.randint(3, 128, (rows, 7), generator=torch.Generator().manual_seed(0))


def tokens(model: nn.Module, seed: int = 1, new: int = 8, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    result: Tensor = model.generate(prompt(), max_new_tokens=new, pad_token_id=0, **options)  # type: ignore[operator]
    return result


def made(name: str, mesh: Any, annotations: dict[str, P] | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    make, plan, _ = MODELS[name]
    alone = make().eval()
    return alone, shardc.parallelize(alone, mesh, plan | (annotations or {}))


@pytest.mark.parametrize("name", MODELS)
def test_it_generates_the_tokens_of_one_device_with_few_programs(name: str) -> None:
    alone, parallel = made(name, Mesh(tp=2))
    assert torch.equal(tokens(parallel), tokens(alone))
    assert torch.equal(tokens(parallel, do_sample=True), tokens(alone, do_sample=True))
    assert len(parallel.shardc.variants) <= MODELS[name][2]  # of which an encoder is one


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"use_cache": False}])
def test_every_way_of_decoding_gives_the_tokens_of_one_device(options: dict[str, Any]) -> None:
    alone, parallel = made("llama", Mesh(dp=2, tp=2), {"input_ids": P("dp")})
    assert torch.equal(tokens(parallel, new=4, **options), tokens(alone, new=4, **options))


def test_compute_and_caches_are_cut() -> None:
    _, parallel = made("llama", Mesh(tp=2))
    tokens(parallel)
    program = parallel.program.program
    shardings = {
        put.name: str(program.sharding(node)) for put, node in zip(program.inputs, program.placeholders, strict=True)
    }
    assert shardings["past_key_values.layers.1.keys"] == "[_, _@tp, _, _]"
    assert [each.kind for each in parallel.program.collectives] == ["all_reduce"] * 4


def test_a_cache_of_the_caller_is_filled_as_on_one_device() -> None:
    alone, parallel = made("gpt2", Mesh(tp=2))
    caches = DynamicCache(), DynamicCache()
    expected, found = caches
    assert torch.equal(tokens(alone, new=3, past_key_values=expected), tokens(parallel, new=3, past_key_values=found))
    assert found.get_seq_length() == expected.get_seq_length() == 9
    torch.testing.assert_close(found.layers[1].keys, expected.layers[1].keys)


def test_it_needs_no_new_program_for_training_afterwards() -> None:
    _, parallel = made("llama", Mesh(tp=2))
    parallel.train()
    parallel(prompt(), labels=prompt()).loss.backward()
    tokens(parallel.eval(), new=3)
    count = len(parallel.shardc.variants)
    parallel.train()
    parallel(prompt(), labels=prompt()).loss.backward()
    assert len(parallel.shardc.variants) == count


class Sampler(nn.Module):
    """A model of one's own with a ``generate``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 2048), nn.Linear(2048, 128)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int, pad_token_id: int) -> Tensor:
        for _ in range(max_new_tokens):
            last = self(ids[:, -8:])[:, -1]
            ids = torch.cat([ids, torch.multinomial(last.softmax(-1), 1)], 1)
        return ids


def sampler(mesh: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    alone = Sampler().eval()
    return alone, shardc.parallelize(alone, mesh, {"head.weight": COLUMNS, "ids": P("dp")})


def test_a_generate_of_ones_own_calls_the_parallel_module() -> None:
    alone, parallel = sampler(Mesh(dp=2, tp=2))
    assert torch.equal(tokens(parallel), tokens(alone))
    assert len(parallel.shardc.variants) == 2  # seven tokens, and eight


def generated(name: str, way: str) -> tuple[bool, str]:
    """On the ranks of a job, which are seeded apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, parallel = sampler(mesh) if name == "own" else made(name, mesh, {"input_ids": P("dp")})
    torch.manual_seed(100 + dist.get_rank())
    own = torch.get_rng_state()
    options = {**WAYS[way], "max_new_tokens": 5, "pad_token_id": 0}
    if dist.get_rank() == 0:
        torch.manual_seed(1)
    found = parallel.generate(prompt(), **options)
    is_left_alone = torch.equal(torch.get_rng_state(), own) if dist.get_rank() else True
    torch.manual_seed(1)
    return torch.equal(found, alone.generate(prompt(), **options)) and is_left_alone, type(found).__name__


@pytest.mark.parametrize(
    ("name", "way"), [("llama", "greedy"), ("llama", "sampled"), ("llama", "beams"), ("t5", "beams"), ("own", "greedy")]
)
def test_all_ranks_of_a_job_generate_the_tokens_of_one_device(gloo: GlooPool, name: str, way: str) -> None:
    assert gloo.run(generated, name, way) == [(True, "Tensor")] * 4


def test_a_module_of_a_pipeline_is_not_called_by_itself() -> None:
    torch.manual_seed(0)
    parallel: Any = shardc.parallelize(t5().eval(), Mesh(pp=2), pipeline=shardc.Pipeline("pp", microbatches=2))
    with pytest.raises(ShardingError, match="called by itself, in a pipeline\n  a pipeline runs the whole model"):
        parallel.encoder(prompt())
