"""Every example runs, alone and as a target; of the demo its pieces, since ``make demo`` runs it whole.

hf_gpt2.py runs where the README shows it, resume.py where ranks are killed, ray_train.py in test_ray_train.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import demo
import finetune_llama_lora
import gpt
import long_context
import mlp
import moe
import pipeline
import pytest
import torch
from demo import ALPHABET, Run, Settings, ShardedRun
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Collective, Mesh

TINY = Settings(steps=3, batch=4, config=gpt.Config(len(ALPHABET), context=16, layers=1, heads=2, width=16))


def test_the_mlp_prints_its_plan_and_equals_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    mlp.main()
    printed = capsys.readouterr().out
    assert "all_reduce" in printed
    differences = [float(found) for found in re.findall(r"differs from one device by (\S+)", printed)]
    assert len(differences) == 5 and max(differences) <= 1e-5


@pytest.mark.slow
def test_the_moe_prints_what_it_sends_and_trains_as_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    moe.main()
    printed = capsys.readouterr().out
    assert sum(map(int, re.findall(r"(\d+) x all_to_all", printed))) == 4 * len(moe.moe()[0].layers)
    losses = [tuple(map(float, found)) for found in re.findall(r"one device (\S+)  4 ranks (\S+)", printed)]
    assert len(losses) == 5 and all(one == pytest.approx(other, abs=1e-5) for one, other in losses)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_long_rows_train_as_on_one_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--length", "96"])
    long_context.main()
    printed = capsys.readouterr().out
    losses = [tuple(map(float, found)) for found in re.findall(r"loss (\S+), on one device (\S+)", printed)]
    assert len(losses) == 3 and all(one == pytest.approx(other, abs=2e-4) for one, other in losses)
    keys_and_values = 2 * 2 * 4 * 96 * 32 * 3 // 4  # in two layers, of two heads of 16
    assert f"{keys_and_values + 8:>9,} bytes that a rank sends by collective_permute in forward" in printed


@pytest.mark.slow
def test_the_pipeline_trains_as_one_device_on_virtual_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.main()
    printed = capsys.readouterr().out
    assert printed.startswith("2 stages on 2 ranks along pp, 4 microbatches by 1f1b")
    assert re.search(r"\nrank 0 F0[^\n]*\nrank 1 \.+F0", printed)  # times are estimated
    losses = [tuple(map(float, found)) for found in re.findall(r"one device (\S+)  two stages (\S+)", printed)]
    assert len(losses) == 5 and all(one == pytest.approx(other, abs=1e-5) for one, other in losses)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_lora_under_torchrun_goes_on_on_virtual_ranks_and_its_adapter_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [finetune_llama_lora.__file__, "--steps", "12", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert len(adapter) == 8 and any(each.any() for name, each in adapter.items() if "lora_B" in name)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    loaded = PeftModel.from_pretrained(LlamaForCausalLM(config), tmp_path).state_dict()
    for name, each in adapter.items():
        torch.testing.assert_close(loaded[name.replace(".weight", ".default.weight")], each)

    shutil.rmtree(tmp_path / "checkpoint-12")
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    finetune_llama_lora.main()
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert re.findall(r"'loss': '(\S+)'", printed) == re.findall(r"'loss': '(\S+)'", done.stdout)[10:]
    torch.testing.assert_close(load_file(tmp_path / "adapter_model.safetensors"), adapter, atol=1e-4, rtol=1e-3)


def collectives(target: Callable[[], gpt.Target], mesh: Mesh) -> tuple[Collective, ...]:
    model, args, kwargs, annotations = target()
    return shardc.compile(model, mesh, annotations, args=args, kwargs=kwargs).collectives


@pytest.mark.slow
@pytest.mark.parametrize("target", [gpt.gpt, gpt.gpt_separate_qkv, gpt.gpt_tied, gpt.gpt_dropout])
def test_two_weight_annotations_a_block_are_megatron(target: Callable[[], gpt.Target]) -> None:
    found = collectives(target, Mesh(dp=2, tp=2))
    assert {each.kind for each in found} == {"all_reduce"}
    along_tp = Counter(each.phase for each in found if "tp" in each.axes)
    assert along_tp == {"forward": 2 * gpt.Config().layers, "backward": 2 * gpt.Config().layers}


@pytest.mark.slow
def test_cut_parameters_are_gathered_and_their_gradients_reduce_scattered() -> None:
    found = collectives(gpt.gpt_fsdp, Mesh(dp=4))
    assert Counter(each.kind for each in found) == {"all_gather": 4, "reduce_scatter": 1, "all_reduce": 2}
    assert [each.local_shape_out for each in found if each.kind == "all_reduce"] == [(), ()]  # number of targets, loss


@pytest.mark.slow
def test_the_gpt_equals_one_device_on_virtual_ranks() -> None:
    model, args, kwargs, annotations = gpt.gpt()
    program = shardc.compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    loss, gradients = program.simulate(*args, **kwargs)
    expected = model(*args, **kwargs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5)


# The demo's pieces.


def test_the_text_is_english_in_the_alphabet() -> None:
    data = demo.corpus()
    text = "".join(ALPHABET[i] for i in data[:5000].tolist())
    assert len(data) > 100_000 and 0 <= data.min() and data.max() < len(ALPHABET) == 96
    assert text.count(" the ") > 10


def test_batches_are_the_same_for_every_run_and_targets_are_the_characters_that_follow() -> None:
    first, again = list(demo.batches(TINY)), list(demo.batches(TINY))
    assert len(first) == TINY.steps and first[0][0].shape == (4, 16)
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert all(torch.equal(ids[:, 1:], targets[:, :-1]) for ids, targets in first)
    assert not torch.equal(first[0][0], first[1][0])


def test_both_runs_begin_with_the_same_weights() -> None:
    one, other = demo.new_model(TINY).state_dict(), demo.new_model(TINY).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_run_on_one_device_learns() -> None:
    run = demo.train_alone(replace(TINY, steps=20))
    assert len(run.losses) == len(run.seconds) == 20
    assert run.losses[-1] < run.losses[0]


def sharded_run(losses: list[float], wire_bytes: float | None) -> ShardedRun:
    each = Collective("all_reduce", ("dp",), "float32", (1000,), (1000,), 4000, 4000, phase="backward")
    return ShardedRun(Run(2000, losses, [0.2] * 3), 1.5, (each, replace(each, axes=("tp",)), each), wire_bytes, {})


def test_the_tables_show_both_losses_and_the_bytes_of_all_ranks() -> None:
    alone, sharded = Run(4000, [3.0, 2.5, 2.0], [0.1] * 3), sharded_run([3.0, 2.5, 2.000001], 48_096.0)
    losses = demo.losses_table(TINY, alone, sharded.run).splitlines()
    assert losses[0].split() == ["step", "one", "device", "4", "ranks", "difference"]
    assert losses[-1].split() == ["3", "2.000000", "2.000001", "1.0e-06"]
    bytes_ = demo.bytes_table(TINY, sharded)
    assert re.search(r"all_reduce +dp +backward +2 +32\.0 kB", bytes_) and re.search(r"announced.* 3 +48\.0 kB", bytes_)
    assert "+0.20%" in demo.facts(TINY, alone, sharded)


@pytest.mark.parametrize(
    ("last_loss", "wire_bytes", "good"),
    [(2.000001, 48_096.0, True), (2.0001, 48_096.0, False), (2.0, 49_000.0, False), (2.0, 40_000.0, False),
     (float("nan"), 48_096.0, False), (2.0, 0.0, False), (2.0, None, True), (2.0001, None, False)],
)  # fmt: skip
def test_the_demo_fails_when_losses_or_bytes_differ(last_loss: float, wire_bytes: float | None, good: bool) -> None:
    alone = Run(4000, [3.0, 2.5, 2.0], [0.1] * 3)
    assert demo.is_good(TINY, alone, sharded_run([3.0, 2.5, last_loss], wire_bytes)) is good


def test_bytes_a_step_are_those_of_the_quietest_steps() -> None:
    assert demo.bytes_a_step([0, 5000, 6000, 7500], 10) == 100
    assert demo.bytes_a_step([None, None], 10) is None


def test_the_sample_is_text() -> None:
    text = demo.sample(TINY.config, demo.new_model(TINY).state_dict(), length=20)
    assert 0 < len(text) <= 21 and set(text) <= set(ALPHABET)


def test_progress_off_a_terminal_is_a_line_at_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = demo.Progress("ranks", 80)
    for step in range(1, 81):
        progress.show(step)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and "[##############################] 80/80" in lines[-1]
