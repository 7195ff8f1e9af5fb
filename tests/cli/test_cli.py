"""The command line: output, streams and exit codes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import mlp

from shardc import Local, Mesh, P, compile, verify
from shardc.cli import dump
from shardc.cli.main import main
from shardc.cli.targets.target import TargetOptions, load_target
from shardc.language.errors import UsageError

HERE = Path(__file__).parents[1] / "support"
FILE = f"{HERE / 'targets.py'}"
ON_FOUR = ["--mesh", "dp=2,tp=2"]


def test_dump_prints_the_program_and_its_tables_on_stdout_and_its_talk_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("program (lowered) on dp=2, tp=2\n")
    assert "  parameter down.weight: f32[8, 32@tp]\n" in out and "\nup.weight    f32[32@tp, 8]  f32[16, 8]" in out
    assert "memory of one rank" in out and "floating-point operations" in out
    assert "shardc: loading" in err and "shardc: compiling" in err and "shardc" not in out


def test_dump_is_equal_to_the_byte_and_names_no_absolute_path(capsys: pytest.CaptureFixture[str]) -> None:
    for format_ in ("text", "json", "dot"):
        texts = []
        for _ in range(2):
            assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--format", format_]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        assert str(HERE) not in texts[0] and "0x" not in texts[0]


def test_dump_json_counts_one_all_reduce_of_activations_for_two_layers_cut_as_megatron(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    over_tp = [c for c in record["collectives"] if c["axes"] == ["tp"]]
    assert [(c["kind"], c["phase"], c["local_shape_out"]) for c in over_tp] == [("all_reduce", "forward", [4, 8])]
    assert all(c["source"] and c["cause"] for c in over_tp)
    assert record["version"] == 1 and record["memory"]["parameters"] == 4 * (8 * 16 + 16 + 16 * 8 + 8)
    assert record["flops"]["per_rank"] * 4 == record["flops"]["whole"] > 0


def test_dump_after_a_pass_is_the_program_of_that_level(capsys: pytest.CaptureFixture[str]) -> None:
    levels = {"capture": "captured", "propagate": "annotated", "insert_reshards": "agreed", "localize": "localized"}
    for name, level in levels.items():
        assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--after", name]) == 0
        assert capsys.readouterr().out.startswith(f"program ({level})")


def test_dump_only_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--only", "collectives"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("phase ") and "parameter" not in out.split("\n\n")[0]
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--only", "collectives", "--format", "json"]) == 0
    assert "nodes" not in json.loads(capsys.readouterr().out)


def test_dump_without_training_has_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--no-train"]) == 0
    out = capsys.readouterr().out
    assert "\nforward\n" in out and "\nbackward\n" not in out and "\n  gradient " not in out


def test_dump_writes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dump.json"
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--format", "json", "-o", str(path)]) == 0
    assert capsys.readouterr().out == "" and json.loads(path.read_text())["mesh"] == {"dp": 2, "tp": 2}


def test_seconds_are_printed_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--format", "json", "-v"]) == 0
    assert list(json.loads(capsys.readouterr().out)["seconds"])[:2] == ["capture", "cut_stages"]


def test_annotations_are_read_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--annotate", "x=dp", "--annotate", "target=dp", "--annotate", "down.weight=-,tp"]
    assert main(["dump", f"{FILE}:bare", *ON_FOUR, *given]) == 0
    ours = capsys.readouterr().out
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR]) == 0
    assert ours == capsys.readouterr().out


def test_a_target_may_be_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "targets:mlp", *ON_FOUR, "--only", "collectives"]) == 0


def test_a_function_that_takes_a_mesh_is_given_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:for_mesh", "--mesh", "dp=2"]) == 0
    assert "input target: f32[8@dp, 8]" in capsys.readouterr().out
    assert main(["dump", f"{FILE}:mlp", "--mesh", "dp=2"]) == 4
    assert "down.weight" in capsys.readouterr().err


def test_settings_reach_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--set", "dropout=0.5"]) == 0
    assert "uniform" in capsys.readouterr().out


def test_verify_holds_outputs_and_gradients_in_two_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{FILE}:mlp", *ON_FOUR]) == 0
    out = capsys.readouterr().out
    checks = ("sharded against single device, {}", "single device against eager, {}")
    for check in (check.format(dtype) for check in checks for dtype in ("float64", "float32")):
        assert f"{check}: 6 tensors agree" in out
    assert "gradient up.weight" in out


def test_verify_compares_the_program_of_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    """On its ranks and its part of the batch, of which outputs have the shapes; an axis that is none is refused."""
    assert main(["verify", f"{FILE}:mlp", *ON_FOUR, "--local", "dp=20"]) == 0
    out, err = capsys.readouterr()
    assert "float64: 2 virtual ranks of one group ..." in err and "4 virtual ranks" not in err
    assert out.endswith("one group of --local was compared, on its part of the batch; outer steps are left out\n")
    model, args, _, annotations = mlp()
    seen: list[Any] = []
    local = {"local": Local("dp", 20)}
    found = verify.verify(model, Mesh(dp=2, tp=2), annotations, args=args, options=local, watch=seen.append)
    assert all(each.is_small for each in found) and {each.mesh.sizes["dp"] for each in seen} == {1}
    assert main(["verify", f"{FILE}:mlp", *ON_FOUR, "--local", "dc=20"]) == 2
    assert "it has no such axis" in capsys.readouterr().err


def test_verify_exits_with_1_and_names_the_tensor_that_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardc.runtime.comm.simulated import SimulatedComm

    def loses_one(self: Any, xs: Any, axes: Any, op: str) -> Any:
        return xs

    monkeypatch.setattr(SimulatedComm, "all_reduce", loses_one)
    monkeypatch.setattr("shardc.runtime.comm.dtensor.torch.equal", lambda a, b: True)
    assert main(["verify", f"{FILE}:mlp", *ON_FOUR]) == 1
    assert "differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["dump", f"{FILE}:nothing", *ON_FOUR], 2, "has no 'nothing'"),
        (["dump", f"{FILE}:mpl", *ON_FOUR], 2, "did you mean mlp?"),
        (["dump", "nowhere.py:f", *ON_FOUR], 2, "there is no such file"),
        (["dump", "no_such_module:f", *ON_FOUR], 2, "there is no such module"),
        (["dump", "targets", *ON_FOUR], 2, "write path.py:function"),
        (["dump", f"{FILE}:not_a_model", *ON_FOUR], 2, "it returned a tuple of str, tuple"),
        (["dump", f"{FILE}:failing", *ON_FOUR], 2, "failing() raised RuntimeError\n  no such data\n  mend targets.py:"),
        (["dump", f"{FILE}:mlp", *ON_FOUR, "--after", "propagat"], 2, "the passes are capture, cut_stages"),
        (["dump", f"{FILE}:mlp", *ON_FOUR, "--batch", "4"], 2, "--batch is for hf: targets"),
        (["dump", f"{FILE}:mlp", *ON_FOUR, "--seq", "4"], 2, "--set seq=8"),
        (["dump", f"{FILE}:mlp", *ON_FOUR, "-o", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["dump", f"{FILE}:branching", "--mesh", "dp=2"], 3, "targets.py"),
        (["dump", f"{FILE}:sparse", "--mesh", "dp=2"], 3, "a tensor here is sparse_coo"),
        (["dump", f"{FILE}:bare", *ON_FOUR, "--annotate", "up.wieght=tp"], 4, "up.weight"),
        (["dump", f"{FILE}:bare", *ON_FOUR, "--annotate", "x=pp"], 4, "'pp'"),
        (["dump", f"{FILE}:bare", *ON_FOUR, "--annotate", "x"], 4, "PATTERN=SPEC"),
        (["verify", f"{FILE}:bare", *ON_FOUR, "--annotate", "x=dp,tp,dp"], 4, "dp"),
    ],
)
def test_mistakes_have_their_exit_codes(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


@pytest.mark.parametrize("mesh", ["dp", "dp=two", "dp=0", "2=dp", ""])
def test_a_mesh_that_does_not_read_is_a_usage_error(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["dump", f"{FILE}:mlp", "--mesh", mesh])
    assert exit_.value.code == 2 and "--mesh" in capsys.readouterr().err


def test_an_internal_error_shows_its_traceback_and_exits_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump, "compiled", lambda options: 1 / 0)
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


# verify as a function.


def test_verify_of_a_random_model_draws_the_same_masks_and_turns_them_off_against_eager() -> None:
    model, args, _, annotations = mlp(dropout=0.5)
    found = verify.verify(model, Mesh(dp=2, tp=2), annotations, args=args)
    assert found and all(each.is_small for each in found), verify.differences_text(found)
    assert model.training


def test_verify_reads_casts_to_float32_as_float64() -> None:
    model, args, _, annotations = mlp(cast=True)
    found = verify.verify(model, Mesh(dp=2, tp=2), annotations, args=args)
    assert {each.dtype for each in found} == {"float64", "float32"}
    assert all(each.is_small for each in found), verify.differences_text(found)


class Places(torch.nn.Module):
    """A table that is no buffer, whole numbers plus a half, and noise between bounds that are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = torch.nn.Parameter(torch.ones(())), torch.randn(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype)
        noise = low + torch.rand(x.shape, dtype=x.dtype) * (high - low) if self.training else low
        return (x + noise.log1p()) @ self.table @ (torch.arange(4) + 0.5) * self.scale


def test_verify_computes_all_of_a_model_in_each_dtype() -> None:
    found = verify.verify(Places(), Mesh(dp=2), {"x": P("dp")}, args=(torch.randn(4, 4),))
    assert {each.dtype for each in found} == {"float64", "float32"}
    assert all(each.is_small for each in found), verify.differences_text(found)


def test_verify_changes_neither_model_nor_default_dtype() -> None:
    model, args, _, annotations = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify.verify(model, Mesh(dp=2, tp=2), annotations, args=args, train=False)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_difference_is_relative_to_what_is_large_and_absolute_to_what_is_small() -> None:
    nan, inf = float("nan"), float("inf")
    assert verify.difference(torch.tensor([0.5]), torch.tensor([0.25])) == 0.25
    assert verify.difference(torch.tensor([101.0, 0.0]), torch.tensor([100.0, 0.0])) == pytest.approx(0.01)
    assert verify.difference(torch.tensor([nan, -inf, 1.0]), torch.tensor([nan, -inf, 1.0])) == 0.0
    assert verify.difference(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert verify.difference(torch.tensor([inf]), torch.tensor([-inf])) == inf
    assert verify.difference(torch.zeros(2), torch.zeros(3)) == inf
    assert verify.difference(None, None) == 0.0 and verify.difference(None, torch.tensor([2.0])) == 2.0
    assert verify.difference(torch.zeros(0), torch.zeros(0)) == 0.0


class Cancels(torch.nn.Module):
    """A sum of large numbers near zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) - 64 * x[0, 0].detach()


@pytest.mark.parametrize(("large", "is_excused"), [(1.0, False), (30.0, True), (3000.0, False)])
def test_what_float32_does_to_a_tensor_on_one_device_excuses_as_much_and_never_much(
    large: float, is_excused: bool
) -> None:
    x = large + torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    found = verify.verify(Cancels(), Mesh(tp=2), {"x": P(None, "tp")}, args=(x,), train=False)
    exact, _, rounded, _ = found
    assert exact.tolerance == 1e-10 and exact.is_small
    assert (1e-5 < rounded.difference <= rounded.tolerance) == rounded.is_rounding == is_excused
    assert is_excused or rounded.tolerance == 1e-5
    assert ("what float32 is off by on one device" in verify.differences_text(found)) == is_excused


# Targets of transformers.


def test_gpt2_of_transformers_gets_inputs_and_two_annotations_a_block() -> None:
    options = TargetOptions({"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16}, batch=4)
    target = load_target("hf:gpt2", options, Mesh(dp=2, tp=2))
    shapes = {name: tuple(value.shape) for name, value in target.kwargs.items()}
    assert shapes == {"input_ids": (4, 16), "labels": (4, 16)}
    assert target.annotations == {
        "input_ids": P("dp"),
        "labels": P("dp"),
        "transformer.h.*.attn.c_proj.weight": P("tp"),
        "transformer.h.*.mlp.c_proj.weight": P("tp"),
    }
    assert set(load_target("hf:gpt2", options, Mesh(tp=2)).annotations) == set(target.annotations) - set(target.kwargs)


def test_a_target_of_transformers_is_dumped_without_allocating_and_alike(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    settings = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    assert main(["dump", "hf:gpt2", *ON_FOUR, *settings]) == 0
    target = load_target("hf:gpt2", TargetOptions(small), Mesh(dp=2, tp=2))
    compiled = compile(target.model, Mesh(dp=2, tp=2), target.annotations, kwargs=target.kwargs)
    assert capsys.readouterr().out == compiled.dump()
    on_meta = load_target("hf:gpt2", TargetOptions(small, device="meta"), Mesh(dp=2, tp=2))
    assert all(parameter.is_meta for parameter in on_meta.model.parameters())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_the_model_of_a_type_is_the_one_it_is_trained_as(model_type: str, name: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    small |= {} if model_type == "vit" else {"vocab_size": 64}
    t5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
    target = load_target(f"hf:{model_type}", TargetOptions(t5 if model_type == "t5" else small, batch=2), Mesh(dp=2))
    assert type(target.model).__name__ == name
    assert target.model(**target.kwargs).loss.ndim == 0


@pytest.mark.parametrize(
    ("options", "mesh", "shape"),
    [
        (TargetOptions({"max_position_embeddings": 514}, device="meta"), Mesh(dp=8), (8, 512)),
        (TargetOptions({"max_position_embeddings": 131072}, device="meta"), Mesh(dp=3), (9, 4096)),
        (TargetOptions({"max_position_embeddings": 131072}, 5, 8192, "meta"), Mesh(dp=8), (5, 8192)),
        (TargetOptions({"max_position_embeddings": 16}, device="meta"), Mesh(tp=2), (8, 16)),
        (TargetOptions({"max_position_embeddings": 514}), Mesh(dp=16), (16, 64)),
    ],
)
def test_text_on_meta_is_as_long_as_the_model_has_positions(
    options: TargetOptions, mesh: Mesh, shape: tuple[int, int]
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    options = replace(options, settings=small | {"vocab_size": 64} | dict(options.settings))
    assert load_target("hf:llama", options, mesh).kwargs["input_ids"].shape == shape


def test_a_target_of_transformers_is_described_with_the_sizes_of_its_inputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 96}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    assert main(["dump", "hf:gpt2", "--mesh", "dp=2", *words, "--only", "collectives"]) == 0
    assert (
        "shardc: hf:gpt2: GPT2LMHeadModel, 2 layers, 0.0 M parameters; inputs input_ids [8, 64], labels [8, 64], "
        "of other sizes with --batch and --seq\n"
    ) in capsys.readouterr().err


def test_an_unknown_model_type_names_near_ones() -> None:
    with pytest.raises(UsageError, match="transformers has no such model type\n  did you mean .*gpt2"):
        load_target("hf:gtp2", TargetOptions(), Mesh(dp=2))


def test_zero_is_an_option_of_axis_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, "--zero", "dp=2", "--only", "collectives"]) == 0
    assert "update    all_gather" in capsys.readouterr().out
    words = ["--zero", "dp+tp=3,gather_over=tp", "--only", "parameters"]
    assert main(["dump", f"{FILE}:mlp", *ON_FOUR, *words]) == 0
    assert re.search(r"down.bias +f32\[\d+@dp\+tp\]", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["dump", f"{FILE}:mlp", *ON_FOUR, "--zero", "dp=4"])
    assert "say 1, 2 or 3" in capsys.readouterr().err


def test_remat_is_an_option_of_modules_or_bytes_and_the_dump_shows_saved_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = []
    for options in ((), ("--remat", "up"), ("--remat", "400")):
        assert main(["dump", f"{FILE}:mlp", *ON_FOUR, *options, "--format", "json"]) == 0
        saved.append(json.loads(capsys.readouterr().out)["memory"]["saved"])
    assert saved[0] == saved[1] > 400 >= saved[2] > 0  # what comes out of the module is read by another
    with pytest.raises(SystemExit):
        main(["dump", f"{FILE}:mlp", *ON_FOUR, "--remat", "-5"])
    assert "it is a whole number of bytes, 0 or more" in capsys.readouterr().err


def test_a_pipeline_is_an_option_of_axis_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    on_two = ["dump", f"{FILE}:for_mesh", "--mesh", "pp=2", "--set", "dropout=0.5"]
    said = "pp,microbatches=4,schedule=gpipe,balance=flops,cuts=down"
    assert main([*on_two, "--pipeline", said, "--only", "collectives"]) == 0
    assert "send_forward_0_to_1" in capsys.readouterr().out
    assert main([*on_two, "--pipeline", said, "--only", "collectives", "--no-train"]) == 0
    assert "backward" not in capsys.readouterr().out
    for text, message in {
        "pp,microbatch=4": "'microbatch'\n  a pipeline has no such setting\n  did you mean microbatches?",
        "pp,microbatches=four": "microbatches='four'\n  it counts pieces of a batch\n  say 1 or more",
        "pp,schedule=1f2b": "there is no such schedule\n  did you mean 1f1b?",
        "microbatches=4": "it does not begin with an axis of the mesh\n  write --pipeline pp,microbatches=8",
    }.items():
        with pytest.raises(SystemExit) as exit_:
            main([*on_two, "--pipeline", text])
        assert exit_.value.code == 2 and message in capsys.readouterr().err
    assert main([*on_two, "--pipeline", "dp"]) == 2
    assert "dp" in capsys.readouterr().err


def test_a_pipeline_is_verified_and_every_pass_is_dumped(capsys: pytest.CaptureFixture[str]) -> None:
    on_two = [f"{FILE}:for_mesh", "--mesh", "dp=2,pp=2", "--pipeline", "pp,microbatches=2"]
    assert main(["verify", *on_two]) == 0
    assert "sharded against single device, float64: 6 tensors agree" in capsys.readouterr().out
    assert main(["dump", *on_two, "--only", "stages", "--after", "propagate"]) == 2
    assert "it has no stages yet" in capsys.readouterr().err
    for name in ("capture", "propagate", "insert_reshards", "lower_reshards", "localize"):
        assert main(["dump", *on_two, "--after", name]) == 0, name


def test_a_bucket_of_one_byte_holds_one_collective(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for options in ((), ("--bucket", "1")):
        assert main(["dump", f"{FILE}:mlp", *ON_FOUR, *options, "--format", "json"]) == 0
        counts.append(len(json.loads(capsys.readouterr().out)["collectives"]))
    assert counts[0] < counts[1]


# Stages.


def test_stages_prints_what_each_holds_and_how_uneven_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages", f"{FILE}:mlp", "--stages", "2", "--cut", "down"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 stages, even in params\n") and "max/mean: 1.04 in params" in out
    assert "\n    0  up " in out and "\n    1  down " in out and "\nto stage  from  value" in out


def test_stages_in_json_and_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stages.json"
    command = ["stages", f"{FILE}:for_mesh", "--stages", "2", "--by", "memory", "--format", "json", "-o", str(path)]
    assert main([*command, "--mesh", "dp=2"]) == 0
    record = json.loads(path.read_text())
    assert capsys.readouterr().out == "" and record["version"] == 1 and len(record["stages"]) == 2
    assert sum(stage["parameters"] for stage in record["stages"]) == 8 * 32 + 32 + 32 * 8 + 8


def test_impossible_stages_are_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages", f"{FILE}:mlp", "--stages", "2", "--cut", "dwn"]) == 2
    assert "did you mean down" in capsys.readouterr().err
    assert main(["stages", f"{FILE}:mlp", "--stages", "2", "--max-memory", "100"]) == 2
    assert "bytes, " in capsys.readouterr().err
    assert main(["stages", f"{FILE}:branching", "--stages", "2"]) == 3
