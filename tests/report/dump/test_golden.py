"""The dump of a small model, whole: a change to any pass or to the printing shows here as a difference to read.

``pytest tests/report/dump/test_golden.py --write-golden`` writes what is printed now.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from targets import convolution, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from shardc import Mesh, P, Pipeline, Zero, compile
from shardc.cli.main import main
from shardc.costs.count import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stages.record import StageRecord
from shardc.language.record import json_of, json_text
from shardc.program.traffic import collectives_of

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("format_", ["text", "json", "dot"])
def test_the_dump_of_two_layers_cut_as_megatron_is_golden(format_: str, golden: Callable[..., None]) -> None:
    model, args, kwargs, annotations = mlp()
    dumped = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs).dump(format=format_)
    golden(f"mlp.{format_.replace('text', 'txt')}", dumped)


def test_the_report_of_two_layers_is_golden(golden: Callable[..., None]) -> None:
    """But for its styles and scripts, which a browser reads in test_report.py."""
    model, args, kwargs, annotations = mlp()
    page = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs).dump("html")
    bare = re.sub(r"(<style>|<script>).*?(</style>|</script>)", r"\1...\2", page, flags=re.DOTALL)
    bare = re.sub(r"sha256-[^']*", "sha256-...", bare)
    data = re.search(r'(?<=id="data">).*?(?=</script>)', bare)
    assert data is not None
    golden("mlp.html", bare.replace(data[0], f"\n{json_text(json.loads(data[0]))}"))


@pytest.mark.parametrize(
    ("option", "name"), [("--diff=insert_reshards", "diff_passes.txt"), ("--format=dot", "pipeline.dot")]
)
def test_the_diff_of_a_pass_and_a_drawn_pipeline_are_golden(
    option: str, name: str, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = ["--mesh", "pp=2", "--pipeline", "pp,microbatches=2"] if name == "pipeline.dot" else ["--mesh", "dp=2,tp=2"]
    assert main(["dump", "targets:for_mesh", *mesh, option]) == 0
    golden(name, capsys.readouterr().out)


def test_the_dump_of_a_convolution_over_a_cut_height_is_golden(golden: Callable[..., None]) -> None:
    model, args, kwargs, annotations = convolution()
    dumped = compile(model, Mesh(x=4), annotations, args=args, kwargs=kwargs).dump()
    golden("convolution.txt", dumped)


@pytest.mark.parametrize("cast", [False, True])
def test_the_dump_announces_what_the_localized_program_does(cast: bool) -> None:
    model, args, kwargs, annotations = mlp(dropout=0.5, cast=cast)
    compiled = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    lowered = compiled.at("bucket_collectives")
    assert lowered.level == "lowered" and compiled.program.level == "localized"
    assert collectives_of(lowered) == compiled.collectives
    assert memory_of(lowered) == compiled.memory
    assert flops_of(lowered, of_rank=True) == flops_of(compiled.program)


@pytest.mark.parametrize("format_", ["text", "json"])
def test_the_pipeline_of_a_tied_gpt_is_golden(
    format_: str, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = ["--mesh", "pp=2", "--pipeline", "pp,microbatches=4", "--only", "stages"]
    assert main(["dump", "gpt:gpt_tied", *pipeline, "--format", format_]) == 0
    golden(f"pipeline.{format_.replace('text', 'txt')}", capsys.readouterr().out)


def test_the_gradient_of_a_tied_weight_is_sent_once_a_step() -> None:
    path = GOLDEN / "pipeline.json"
    sent = [each for stage in json.loads(path.read_text())["stages"] for each in stage["sent"]]
    weight = [(each["to"], each["times"]) for each in sent for v in each["values"] if v["type"] == "f32[128, 64]"]
    assert sorted(weight) == [(0, 1), (1, 1)]


def test_in_one_stage_microbatches_repeat_what_ranks_exchange() -> None:
    model, args, kwargs, annotations = mlp()
    pipeline = Pipeline(microbatches=4)
    compiled = compile(model, Mesh(dp=2, tp=2, pp=1), annotations, args=args, kwargs=kwargs, pipeline=pipeline)
    times = {(each.phase, each.axes): each.times for each in compiled.collectives}
    assert times == {("forward", ("tp",)): 4, ("forward", ("dp",)): 1, ("backward", ("dp",)): 1}
    assert compiled.dump(only="stages").startswith("1 stage on 1 rank along pp, 4 microbatches by 1f1b")


class Layers(nn.Module):
    """Four, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.1)
        return x.square().mean()


def test_a_pipeline_announces_lowered_what_it_does_localized() -> None:
    pipeline = Pipeline(microbatches=2, schedule="auto", chunks=2)
    args, annotations = (torch.zeros(8, 8),), {"x": P("dp")}
    compiled = compile(Layers(), Mesh(dp=2, pp=2), annotations, args=args, zero=Zero("dp"), pipeline=pipeline)
    lowered, localized = (StageRecord(each) for each in (compiled.at("overlap_collectives"), compiled.program))
    assert lowered.entries() == localized.entries() and lowered.schedule == localized.schedule
    assert memory_of(lowered.program) == compiled.memory
    assert sum(entry.elements for entry in localized.entries()) == sum(p.numel() for p in compiled.model.parameters())
    nodes = json.loads(compiled.dump("json"))["nodes"]
    parts = {(each["stage"], each["part"]) for node in nodes for each in node.get("runs", ()) if "part" in each}
    assert {(stage, part) for stage in range(4) for part in ("forward", "weight_gradient")} <= parts


@pytest.mark.parametrize("format_", ["text", "json"])
def test_the_stages_of_a_tied_gpt_are_golden(
    format_: str, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stages", "gpt:gpt_tied", "--stages", "3", "--by", "flops", "--format", format_]
    assert main(command) == 0
    times = r'\d+\.\d%|[\d.]+ in time|"time": [\d.]+'  # torch before 2.14 copies what a dropout of nothing returns
    golden(f"stages.{format_.replace('text', 'txt')}", capsys.readouterr().out, but=times)


@pytest.mark.parametrize(
    ("command", "name"),
    [(["trace"], "mlp.trace.json"), (["dump", "--only", "time,notes"], "mlp.time.txt")],
)
def test_the_predicted_step_is_golden(
    command: list[str], name: str, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    links = ["--mesh", "dp=2,tp=2", "--links", "dp=nvlink,tp=ethernet", "--device", "cpu"]
    assert main([command[0], "targets:mlp", *links, *command[1:]]) == 0
    golden(name, capsys.readouterr().out)


def test_explanations_are_golden(golden: Callable[..., None]) -> None:
    """A parameter, a value, a module, a collective, a bucket, and one of them as JSON."""
    model, args, kwargs, annotations = mlp()
    compiled = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    names = ("up.bias", "gelu", "down", "all_reduce_tp", "all_reduce_dp_bucket")
    as_json = json.dumps(json_of(compiled.explain("all_reduce_tp")), indent=1) + "\n"
    texts = {"explain.txt": "\n".join(compiled.explain(name).text() for name in names), "explain.json": as_json}
    for name, text in texts.items():
        golden(name, text)
