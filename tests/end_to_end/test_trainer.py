"""The Trainer of transformers trains a parallel module on the ranks of a job as it trains the model on one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import as_torchrun
from gloo_pool import GlooPool
from hf_models import GATED, SIZES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero

PLAN = {**GATED, "input_ids": P("dp"), "attention_mask": P("dp")}
Result = dict[str, Any]


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.0))


def samples(count: int) -> list[dict[str, Any]]:
    """Token ids, and a column that no argument of the model has the name of."""
    rows = torch.randint(3, 128, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "source": "a book"} for row in rows]


def trainer(model: Any, folder: str, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    data = arguments.pop("data", None) or samples(64)
    options = TrainingArguments(folder, **{**defaults, **arguments}, report_to=[], disable_tqdm=True)
    found = Trainer(model=model, args=options, train_dataset=data, eval_dataset=samples(20))
    found.remove_callback(PrinterCallback)
    return found


def trained(run: Trainer, resume: str | None = None) -> Result:
    """What a run logs, evaluates and predicts."""
    run.train(resume_from_checkpoint=resume)
    log, kinds = run.state.log_history, ("loss", "learning_rate", "grad_norm", "total_flos")
    found: Result = {kind: [each[kind] for each in log if kind in each] for kind in kinds}
    found["eval_loss"] = run.evaluate()["eval_loss"]
    predicted = run.predict(run.eval_dataset)
    return found | {"shape": predicted.predictions.shape, "sum": float(abs(predicted.predictions).sum())}


def on_ranks(sizes: tuple[int, int], **options: Any) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    return shardc.parallelize(options.pop("model", None) or llama(), mesh, PLAN, zero=Zero("dp", 3), **options)


def differences(found: list[Result], expected: Result) -> list[tuple[str, Any, Any]]:
    """What differs by more than 1e-5, of any rank."""
    close = {key: pytest.approx(each, abs=1e-5, rel=1e-5) for key, each in expected.items()}
    return [(key, each[key], expected[key]) for each in found for key in close if each[key] != close[key]]


# Training.


def trained_on_ranks(folder: str, arguments: dict[str, Any]) -> Result:
    with as_torchrun():
        run = trainer(on_ranks((2, 2)), folder, **arguments)
        torch.manual_seed(run.args.seed + dist.get_rank())  # the order of samples is the first rank's
        return trained(run)


UNEVEN = {
    "per_device_train_batch_size": 7, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "warmup_steps": 2,
    "lr_scheduler_type": "cosine", "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2,
    "use_cpu": True,
}  # fmt: skip


@pytest.mark.parametrize("arguments", [{"max_steps": 30, "save_steps": 10}, UNEVEN], ids=["30 steps", "uneven batches"])
def test_ranks_train_evaluate_and_predict_as_one_device(
    gloo: GlooPool, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    expected = trained(trainer(llama(), str(tmp_path / "alone"), **arguments))
    found = gloo.run(trained_on_ranks, str(tmp_path / "ranks"), arguments)
    assert not differences(found, expected)
    assert expected["shape"] == (20, 12, 128) and len(expected["loss"]) == arguments.get("max_steps", 4)
    last = f"checkpoint-{len(expected['loss'])}"
    checkpoints = [set(os.listdir(tmp_path / run / last)) for run in ("alone", "ranks")]
    assert checkpoints[1] == checkpoints[0] | {"shardc_draws.json"}
    loaded, alone = (LlamaForCausalLM.from_pretrained(tmp_path / run / last) for run in ("ranks", "alone"))
    torch.testing.assert_close(loaded.state_dict(), alone.state_dict(), atol=1e-4, rtol=1e-3)


def bfloat16_on_ranks(folder: str) -> Result:
    with as_torchrun():
        return trained(trainer(on_ranks((2, 2)), folder, bf16=True, use_cpu=True, save_strategy="no"))


def test_ranks_compute_in_bfloat16_under_autocast(gloo: GlooPool, tmp_path: Path) -> None:
    whole, half = (trained(trainer(llama(), str(tmp_path), bf16=bf16, use_cpu=True)) for bf16 in (False, True))
    found = gloo.run(bfloat16_on_ranks, str(tmp_path))[0]
    assert found["loss"] == pytest.approx(half["loss"], abs=5e-3)
    assert found["loss"] != pytest.approx(whole["loss"], abs=1e-5)


# Checkpoints.


def resumed_on_ranks(folder: str, sizes: tuple[int, int], resume: str) -> tuple[Result, bool]:
    """What a resumed run does, and whether its optimizer stores what its parameters do."""
    with as_torchrun():
        run = trainer(on_ranks(sizes), folder, save_strategy="no")
        found = trained(run, resume)
        states = run.optimizer.optimizer.state.items()
        assert states and all(isinstance(values["exp_avg"], DTensor) for _, values in states)
        return found, all(values["exp_avg"].placements == parameter.placements for parameter, values in states)


def test_a_run_resumes_on_another_mesh_and_on_one_device(gloo: GlooPool, tmp_path: Path) -> None:
    expected = trained(trainer(llama(), str(tmp_path / "alone")))
    found = gloo.run(trained_on_ranks, str(tmp_path / "ranks"), {})
    checkpoint, other = (str(tmp_path / run / "checkpoint-2") for run in ("ranks", "alone"))
    for source, sizes in ((checkpoint, (4, 1)), (other, (1, 4))):
        found, is_cut = zip(*gloo.run(resumed_on_ranks, str(tmp_path), sizes, source), strict=True)
        assert not differences(found, expected) and all(is_cut)
    assert not differences([trained(trainer(llama(), str(tmp_path)), checkpoint)], expected)


def resumed_from_meta(folder: str, weights: str, resume: str | None) -> Result:
    with as_torchrun(), torch.device("meta"):
        model = llama()
    with as_torchrun():
        return trained(trainer(on_ranks((2, 2), model=model, weights=weights), folder), resume)


def test_a_model_on_meta_trains_from_files_and_resumes(gloo: GlooPool, tmp_path: Path) -> None:
    expected = trained(trainer(llama(), str(tmp_path / "alone")))
    llama().save_pretrained(tmp_path / "weights")
    weights, folder = str(tmp_path / "weights"), str(tmp_path / "ranks")
    assert not differences(gloo.run(resumed_from_meta, folder, weights, None), expected)
    resumed = gloo.run(resumed_from_meta, str(tmp_path / "again"), weights, f"{folder}/checkpoint-2")
    assert not differences(resumed, expected)


class Dropping(torch.nn.Module):
    """A model that is not one of transformers, with tied weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = torch.nn.Embedding(128, 16), torch.nn.Dropout(), torch.nn.Linear(16, 128)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.drop(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def dropping(mesh: Any, folder: str, resume: str | None) -> Result:
    plan = {"embed.weight": P("tp"), "input_ids": P("dp")}
    return trained(trainer(shardc.parallelize(Dropping(), mesh, plan), folder, use_cpu=True), resume)


def dropping_on_ranks(folder: str, resume: str | None) -> Result:
    with as_torchrun():
        return dropping(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), folder, resume)


def test_dropout_goes_on_where_it_was_and_tied_weights_are_saved(gloo: GlooPool, tmp_path: Path) -> None:
    expected = gloo.run(dropping_on_ranks, str(tmp_path / "ranks"), None)[0]
    resumed = gloo.run(dropping_on_ranks, str(tmp_path / "again"), str(tmp_path / "ranks" / "checkpoint-2"))
    assert not differences(resumed, expected)
    virtual = dropping(Mesh(dp=2, tp=2), str(tmp_path), str(tmp_path / "ranks" / "checkpoint-2"))
    assert not differences([virtual], expected)


def test_dropout_has_the_trainers_seed_unless_one_was_given(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    plan, seeds = {"embed.weight": P("tp"), "input_ids": P("dp")}, list[int]()
    for given in (None, 7):
        model = shardc.parallelize(Dropping(), Mesh(dp=2, tp=2), plan, seed=given)
        trainer(model, str(tmp_path), use_cpu=True, seed=3, max_steps=1, save_strategy="no").train()
        seeds.append(model.seed)
    assert seeds == [3, 7]
    assert not [each for each in recwarn if "seeded" in str(each.message)]


# What does not fit.


def message(do: Callable[[], Any]) -> str:
    try:
        do()
    except ShardingError as error:
        return str(error)
    return "no error"


def refused(folder: str, arguments: dict[str, Any]) -> str:
    with as_torchrun():
        return message(lambda: trainer(on_ranks((2, 2)), folder, **arguments).train())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"save_on_each_node": True}, "save_on_each_node=True\n  the first rank of the job writes for all"),
        ({"fsdp": True}, "fsdp=True\n  the module is cut already\n  leave fsdp out, and say zero= in parallelize"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True\n  each rank would get rows"),
        ({"torch_compile": True}, "say parallelize(..., compile='inductor')"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else None,
)
def test_arguments_that_do_not_fit_are_refused(
    gloo: GlooPool, tmp_path: Path, arguments: dict[str, Any], expected: str
) -> None:
    assert all(expected in each for each in gloo.run(refused, str(tmp_path), arguments))


def misused(folder: str) -> list[str]:
    """Rows of each rank's own; a save by one rank alone; a pipeline whose optimizer one rank would save."""
    with as_torchrun():
        rank, module = dist.get_rank(), on_ranks((2, 2))
        rows = message(trainer(module, folder, data=samples(64)[rank::4], save_strategy="no").train)
        run = trainer(module, folder, save_strategy="no")
        run.train()
        alone = message(lambda: run.save_model() if rank == 0 else run.evaluate())
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
        piped = shardc.parallelize(llama(), mesh, {}, pipeline=Pipeline("pp", microbatches=2))
        return [rows, alone, message(lambda: trainer(piped, folder))]


def test_what_ranks_may_not_do_alone_is_an_error_on_all_of_them(gloo: GlooPool, tmp_path: Path) -> None:
    for rows, alone, piped in gloo.run(misused, str(tmp_path)):
        assert "input 'input_ids': it differs on rank" in rows
        assert "rank 0 saves, loads or exports LlamaForCausalLM" in alone and "begins an epoch of a DataLoader" in alone
        assert piped.endswith("say save_only_model=True, or save_strategy='no' and call shardc.save in a callback")


def plain_after_parallel(folder: str) -> tuple[str, int, float]:
    with as_torchrun():
        with suppress(ShardingError):
            trainer(on_ranks((2, 2)), folder, fsdp=True)
        run = trainer(on_ranks((2, 2)), folder, save_strategy="no")
        run.train()
        plain = trainer(llama(), folder, save_strategy="no", use_cpu=True, per_device_train_batch_size=2)
        plain.train()
        return type(plain.model_wrapped).__name__, plain.args.world_size, plain.state.log_history[0]["loss"]


def test_another_model_is_trained_as_it_always_is(gloo: GlooPool, tmp_path: Path) -> None:
    expected = trained(trainer(llama(), str(tmp_path)))["loss"][0]
    for name, size, loss in gloo.run(plain_after_parallel, str(tmp_path)):
        assert (name, size) == ("DistributedDataParallel", 4)
        assert math.isfinite(loss) and loss == pytest.approx(expected, abs=0.5)
