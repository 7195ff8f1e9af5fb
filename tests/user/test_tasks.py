"""Twelve tasks of a new user, each a script written from the README and the guides, and compared with one device."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from shardc import Precision, Remat, Zero
from shardc.cli.main import main as command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.slow


def same(losses: list[float], expected: list[float]) -> bool:
    return len(losses) == len(expected) > 0 and losses == pytest.approx(expected, abs=1e-5)


def torchrun(script: str, *arguments: str) -> list[Any]:
    """The lines that a script prints on the first of two gloo ranks, as Python values."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(ROOT), str(ROOT / "examples"), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines() if line]


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The losses of the loop on one rank."""
    return importlib.import_module("own_loop").main(tmp_path_factory.mktemp("one"), ranks=1)


def test_an_own_loop_accumulates_clips_evaluates_samples_and_resumes(own_loop: Any, tmp_path: Path) -> None:
    losses, evaluated, tokens = importlib.import_module("own_loop").main(tmp_path)
    assert same([*losses, evaluated], [*own_loop[0], own_loop[1]]) and tokens == own_loop[2]
    assert losses[-1] < losses[0] and len(tokens) == 7


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_the_own_loop_is_the_same_under_torchrun(own_loop: Any, tmp_path: Path) -> None:
    losses, evaluated, tokens = torchrun("own_loop.py", str(tmp_path))
    assert same([*losses, evaluated], [*own_loop[0], own_loop[1]]) and tokens == own_loop[2]


def test_a_llama_trains_with_tensor_parallelism_and_zero() -> None:
    assert same(*importlib.import_module("llama").main())


def test_experts_are_each_cut_or_spread_over_ranks() -> None:
    inside, whole, expected = importlib.import_module("experts").main()
    assert same(inside, expected) and same(whole, expected)


def test_models_like_qwen_train_also_where_heads_do_not_divide() -> None:
    assert all(same(losses, expected) for losses, expected in importlib.import_module("qwen").main())


def test_an_adapter_of_peft_is_trained_and_read_by_plain_peft() -> None:
    losses, expected, after = importlib.import_module("lora").main()
    assert same(losses, expected) and same(after[:1], after[1:]) and after[0] != losses[-1]


def test_weights_come_from_a_folder_and_go_back() -> None:
    losses, expected, (saved, exported, trained) = importlib.import_module("folders").main()
    assert same(losses, expected) and saved.keys() == exported.keys() == trained.keys()
    for name, value in trained.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5)
        assert torch.equal(saved[name], exported[name])


@pytest.mark.sweep  # a minute or two
def test_a_plan_for_7_b_on_16_gpus_fits() -> None:
    parameters, plan = importlib.import_module("plan_7b").main(mesh="16", zero=3, remat=Remat("model.layers.*"))
    assert parameters == 6_738_415_616 and plan.mesh.size == 16
    assert plan.fits and plan.memory["peak"] < 80e9
    stored = sum(plan.memory[each] for each in ("parameters", "gradients", "optimizer"))
    # Bytes of a parameter: 4, and 2 for its copy in bfloat16; gradient: 4; Adam's states: 8. All are cut.
    assert stored == 18 * parameters // 16
    assert plan["zero"] == Zero("dp", 3) and plan["precision"] == Precision() and "shardc.Zero" in plan.text()


def test_a_pipeline_trains_in_two_stages() -> None:
    assert same(*importlib.import_module("stages").main())


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_the_pipeline_has_a_stage_a_rank_under_torchrun() -> None:
    assert same(*torchrun("stages.py"))


def test_the_report_is_a_page_and_the_commands_print_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, tables, why = importlib.import_module("look").main()
    assert page.startswith("<!doctype html>") and "model.layers.0.mlp.down_proj" in page
    assert "all_reduce_tp" in tables and "peak" in tables and "*.o_proj.weight: P(None, 'tp')" in why
    target, written = [f"{HERE / 'look.py'}:model", "--mesh", "dp=2,tp=2"], tmp_path / "report.html"
    assert command(["dump", *target, "--format", "html", "-o", str(written)]) == 0
    assert "model.layers.0.mlp.down_proj" in written.read_text()
    assert command(["explain", *target, "all_reduce_tp"]) == 0
    assert "*.o_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", importlib.import_module("mistakes").MISTAKES)
def test_a_mistake_is_an_error_that_names_the_argument_and_says_what_to_type(mistake: str) -> None:
    typed, name, remedy = importlib.import_module("mistakes").MISTAKES[mistake]
    with pytest.raises(shardc.ShardingError) as error:
        typed()
    assert name in str(error.value) and remedy in str(error.value)


def test_rows_of_32_k_tokens_are_cut_and_recomputed_in_bfloat16() -> None:
    long_rows = importlib.import_module("long_rows")
    (whole, flops), (cut, cut_flops), (small, _), (ring, ring_flops) = long_rows.plans()
    assert cut < 0.6 * whole and small < 0.4 * cut and cut_flops == pytest.approx(flops / 2, rel=0.01)
    assert ring < 0.3 * whole and ring_flops == pytest.approx(flops / 4, rel=0.01)
    with torch.no_grad():
        loss, expected = long_rows.losses()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss, expected = long_rows.losses(2048, precision=Precision(torch.bfloat16), remat=Remat("model.layers.*"))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-3)  # bfloat16 has 8 bits


def test_tokens_come_from_a_cache_cut_by_heads() -> None:
    (tokens, expected), programs = importlib.import_module("inference").main()
    assert tokens == expected and len(tokens) == 19 and programs <= 3


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_tokens_are_the_same_under_torchrun() -> None:
    (tokens, expected), programs = torchrun("inference.py")
    assert tokens == expected and programs <= 3


def test_a_notebook_shows_plans_collectives_and_reasons() -> None:
    cells = [cell for cell in json.loads((HERE / "notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    shown = [show("".join(cell["source"]), namespace) for cell in cells]
    assert all(len(text.splitlines()) < 60 for text in shown)
    words = ("memory of one rank", "@tp", "all_reduce", "because", "virtual ranks")
    assert all(word in text for word, text in zip(words, shown[1:6], strict=True)), shown
    torch.testing.assert_close(namespace["parallel"](namespace["x"]), namespace["model"](namespace["x"]))


def show(source: str, namespace: dict[str, Any]) -> str:
    """Run a cell; returns what a notebook shows for its last line: HTML, or else text."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), namespace)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), namespace)
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
