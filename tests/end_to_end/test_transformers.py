"""Trainer, peft and ``save_pretrained`` of transformers take a parallel module as they take a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from hf_models import GATED, ROWS, SIZES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import shardc
from shardc import Mesh, P, Zero
from shardc.language.errors import CheckpointError

PLAN = {**GATED, "input_ids": P("dp")}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def lora() -> Any:
    torch.manual_seed(0)
    options = {"target_modules": ["c_attn"], "r": 2, "init_lora_weights": False, "fan_in_fan_out": True}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(**options))


def tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, 12), generator=torch.Generator().manual_seed(seed))


# Trainer, with its default arguments but for the length of the run.


def trainer(model: Any, folder: Path, steps: int = 4, **arguments: Any) -> Trainer:
    data = [{"input_ids": row, "labels": row} for row in tokens(64)]
    options = TrainingArguments(str(folder), max_steps=steps, save_steps=2, logging_steps=1, report_to=[], **arguments)
    return Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:20])


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}])
def test_trainer_trains_evaluates_and_predicts_as_on_one_device(tmp_path: Path, arguments: dict[str, Any]) -> None:
    parallel = shardc.parallelize(llama(), Mesh(dp=2, tp=2), PLAN, zero=Zero("dp", 3))
    runs = [trainer(model, tmp_path / str(i), **arguments) for i, model in enumerate((llama(), parallel))]
    for run in runs:
        run.train()
    alone, sharded = runs
    assert losses(sharded) == pytest.approx(losses(alone), abs=1e-5) and len(losses(alone)) == 4
    assert sharded.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], abs=1e-5)
    expected, found = (run.predict(run.eval_dataset).predictions for run in (alone, sharded))
    assert found == pytest.approx(expected, abs=1e-4)


def test_trainer_resumes_from_its_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    whole = trainer(llama(), tmp_path / "alone")
    whole.train()
    first = trainer(shardc.parallelize(llama(), Mesh(dp=2, tp=2), PLAN), tmp_path / "run", steps=4)
    first.train()
    other = shardc.parallelize(llama(), Mesh(dp=4, tp=1), PLAN)
    resumed = trainer(other, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert losses(resumed)[-2:] == pytest.approx(losses(whole)[-2:], abs=1e-5)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    torch.testing.assert_close(loaded.lm_head.weight, other.lm_head.weight, atol=1e-5, rtol=1e-4)


# Files.


def saved(make: str, folder: str) -> bool:
    """Train a step on the ranks of a job, save, and load the folder as one device does."""
    model = globals()[make]()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel: Any = shardc.parallelize(model, mesh, {"*.mlp.c_fc.weight": ROWS, "input_ids": P("dp")}
                                       if make != "mixtral" else {"*.experts.gate_up_proj": P("tp")})  # fmt: skip
    parallel(input_ids=tokens(4), labels=tokens(4)).loss.backward()
    parallel.save_pretrained(folder)
    if dist.get_rank():
        return True
    if make == "lora":
        loaded: Any = peft.PeftModel.from_pretrained(gpt2(), folder)
        return all(torch.equal(each, loaded.state_dict()[name]) for name, each in model.state_dict().items())
    loaded = type(model).from_pretrained(folder)
    assert loaded.config.architectures == [type(model).__name__]
    return all(torch.equal(each, loaded.state_dict()[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("make", ["gpt2", "mixtral", "lora"])
def test_save_pretrained_writes_what_from_pretrained_reads(gloo: GlooPool, tmp_path: Path, make: str) -> None:
    assert gloo.run(saved, make, str(tmp_path)) == [True] * 4
    assert "config.json" in {name.removeprefix("adapter_") for name in os.listdir(tmp_path)}


def loaded_from(folder: str) -> tuple[float, list[Any]]:
    """On the ranks of a job, from a model on meta: the loss, and the shapes that a rank stores."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = shardc.parallelize(on_meta(), mesh, PLAN, weights=folder, zero=Zero("dp", 3))
    loss = parallel(input_ids=tokens(4), labels=tokens(4)).loss
    loss.backward()
    return loss.item(), [tuple(each.to_local().shape) for each in parallel.parameters()][:2]


def on_meta() -> PreTrainedModel:
    with torch.device("meta"):
        return llama()


def test_each_rank_reads_its_shards_of_a_folder_for_a_model_on_meta(gloo: GlooPool, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    expected = llama()(input_ids=tokens(4), labels=tokens(4)).loss.item()
    for loss, shapes in gloo.run(loaded_from, str(tmp_path)):
        assert loss == pytest.approx(expected, abs=1e-6)
        assert shapes == [(64, 32), (16, 32)]


def test_weights_may_be_a_state_dict_and_lack_the_prefix_of_the_base() -> None:
    state = {name.removeprefix("model."): each for name, each in llama().state_dict().items()}
    parallel = shardc.parallelize(on_meta(), Mesh(dp=2, tp=2), PLAN, weights=state)
    expected = llama()(input_ids=tokens(4)).logits
    torch.testing.assert_close(parallel(input_ids=tokens(4)).logits, expected)
    parallel.lm_head.weight.data.zero_()
    assert state["lm_head.weight"].any()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = llama().state_dict()
    norm = state.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match="parameter 'model.norm.weight': it has no values\n  the weights do not"):
        shardc.parallelize(on_meta(), Mesh(dp=2), weights=state)
    with pytest.raises(
        CheckpointError, match=r"tensor 'model.norm.weight': of shape \[32\]\n  the weights have \[16\]"
    ):
        shardc.parallelize(on_meta(), Mesh(dp=2), weights=state | {"model.norm.weight": norm[:16]})
    with pytest.raises(CheckpointError, match="there is no safetensors file in it"):
        shardc.parallelize(on_meta(), Mesh(dp=2), weights=tmp_path)
    with pytest.warns(UserWarning, match="weights: 1 tensors that the model lacks: other"):
        shardc.parallelize(on_meta(), Mesh(dp=2), weights=state | {"model.norm.weight": norm, "other": norm})


# peft.


def test_a_model_with_adapters_trains_and_generates_as_on_one_device() -> None:
    alone = lora()
    parallel: Any = shardc.parallelize(alone, Mesh(dp=2, tp=2), {"*.mlp.c_fc.weight": ROWS, "input_ids": P("dp")})
    found, expected = (model(input_ids=tokens(4), labels=tokens(4)) for model in (parallel, alone))
    expected.loss.backward()
    found.loss.backward()
    gradients = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    assert gradients and all("lora" in name for name in gradients)
    for name, each in parallel.named_parameters():
        torch.testing.assert_close(each.grad, gradients.get(name))
    options = {"input_ids": tokens(2)[:, :7], "max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(parallel.eval().generate(**options), alone.eval().generate(**options))
    assert len(parallel.shardc.variants) == 3
