"""strict: gathers and whole ops that no annotation requires are one error that lists them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpt
import moe
import pytest
import torch
from parallel_models import FSDP, MEGATRON, MLP, batch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardingError
from shardc.cli.main import main

MESH = Mesh(dp=2, tp=2)


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.up, self.down = function, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def compile(function: Callable[[Any, Tensor], Any], annotations: dict[str, Any], strict: bool = True) -> Any:
    return shardc.compile(Model(function), MESH, annotations, args=(torch.randn(4, 8),), strict=strict)


def kinds(program: Any) -> set[str]:
    return {found.kind for found in program.collectives}


CLEAN: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], str]] = {
    "an output asked for whole": (lambda self, x: self.up(x), {"x": P("dp"), "output:*": P()}, "all_gather"),
    "a value placed otherwise": (
        lambda self, x: shardc.annotate(self.up(x), P(None, "dp")).sin().sum(), {"up": P("dp")}, "all_to_all"
    ),
    "a module's output placed whole": (
        lambda self, x: self.down(self.up(x)).sum(), {"up.weight": P("tp"), "up": P()}, "all_gather"
    ),
    "weights stored over the batch's axis": (
        lambda self, x: self.down(self.up(x)).sum(), {"x": P("dp"), "param:*": P("dp")}, "all_gather"
    ),
    "a gradient for a weight that is whole": (
        lambda self, x: (self.up(x).sin() * self.up.weight.sum(1)).sum(),
        {"x": P("dp"), "up": P("dp", "tp"), "param:*": P()},
        "all_gather",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_strict_allows_a_gather_that_an_annotation_requires(name: str) -> None:
    function, annotations, kind = CLEAN[name]
    assert kind in kinds(compile(function, annotations))


@pytest.mark.parametrize("annotations", [MEGATRON, FSDP], ids=["tensor parallel", "FSDP"])
def test_the_usual_plans_are_strict(annotations: dict[str, P]) -> None:
    model = shardc.parallelize(MLP(), MESH, annotations, strict=True)
    model(*batch(0)).backward()
    model(*batch(0, rows=8)).backward()


@pytest.mark.parametrize(
    ("target", "mesh"), [(gpt.gpt_sequence(MESH), MESH), (moe.moe(), Mesh(ep=4))], ids=["sequence parallel", "experts"]
)
def test_data_that_comes_to_annotated_weights_is_asked_for(target: gpt.Target, mesh: Mesh) -> None:
    model, args, _, annotations = target
    assert {"all_gather", "all_to_all"} & kinds(shardc.compile(model, mesh, annotations, args=args, strict=True))


def test_weights_that_come_to_annotated_data_are_not() -> None:
    """Time cut from the input on, over the axis of the weights: these are gathered, which no one said."""
    model, args, _, _ = gpt.gpt()
    annotations = {"ids": P(None, "tp"), "targets": P(None, "tp"), "*.mlp.down.weight": P(None, "tp")}
    with pytest.raises(ShardingError, match="down"):
        shardc.compile(model, Mesh(tp=2), annotations, args=args, strict=True)


def sorts(self: Any, x: Tensor) -> Tensor:
    y = self.up(x)
    return y.sort(dim=1).values.sin().sum()


@torch.library.custom_op("tests::unruly", mutates_args=())
def unruly(x: Tensor) -> Tensor:
    return x.sin()


unruly.register_fake(torch.empty_like)


def runs_whole(self: Any, x: Tensor) -> Tensor:
    return self.up(x).sum() + unruly(self.up(x).detach()).sum()


def line(function: Callable[..., Any], offset: int) -> str:
    return f"test_strict.py:{function.__code__.co_firstlineno + offset}"


def refused(function: Callable[[Any, Tensor], Any], annotations: dict[str, Any]) -> ShardingError:
    compile(function, annotations, strict=False)
    with pytest.raises(ShardingError) as raised:
        compile(function, annotations)
    return raised.value


def test_a_gather_that_no_one_asked_for_names_its_line_what_moves_and_why() -> None:
    error = refused(sorts, {"up.weight": P("tp")})
    assert line(sorts, 2) in error.who or line(sorts, 1) in error.who
    assert error.what.endswith("one rank sends 128 B") and "f32[4, 16@tp] to f32[4, 16]" in error.what
    assert "no annotation asks for it" in error.problem and "tp from up.weight: P('tp')" in error.problem
    assert "shardc.annotate" in error.remedy


def test_an_op_without_a_rule_is_said_once_with_what_is_gathered_for_it() -> None:
    error = refused(runs_whole, {"x": P("dp")})
    assert line(runs_whole, 1) in error.who
    assert "tests.unruly.default has no rule" in error.problem
    assert "shardc.register_rule" in error.remedy


def test_all_offenders_are_listed_at_once() -> None:
    both = refused(lambda self, x: sorts(self, x) + runs_whole(self, x), {"x": P("dp"), "up.weight": P("tp")})
    assert "problems:" in str(both) and "unruly" in str(both) and "sort" in str(both)


def test_weights_stored_over_another_axis_are_gathered_by_a_guess() -> None:
    """Of a cut sequence and a cut weight one must move: which, an annotation shall say."""
    model = nn.Linear(8, 8)
    given = {"args": (torch.randn(4, 6, 8),), "strict": True}
    with pytest.raises(ShardingError, match="no annotation asks for it"):
        shardc.compile(model, MESH, {"input": P("dp", "tp"), "weight": P("tp"), "bias": P("tp")}, **given)


def test_what_moves_for_an_input_names_the_line_that_uses_it() -> None:
    error = refused(lambda self, x: shardc.annotate(self.up(x), P(None, "dp")).sum(), {"x": P("dp")})
    assert "(test_strict.py:" in error.who and "x is f32[4@dp, 8], dot (up) wants f32[4, 8]" in error.problem


def test_the_command_line_refuses_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    strict = ["dump", "targets:mlp", "--mesh", "dp=2,tp=2", "--strict", "--only", "collectives"]
    assert main(strict) == 0
    assert main([*strict, "--annotate", "x=dp,tp"]) == 4
    assert "no annotation asks for it" in capsys.readouterr().err


def test_a_pipeline_is_looked_at_too() -> None:
    model, args, _, _ = gpt.gpt_tied()
    options: dict[str, Any] = {"args": args, "pipeline": shardc.Pipeline(microbatches=2)}
    shardc.compile(model, Mesh(dp=2, pp=2), {"ids": P("dp"), "targets": P("dp")}, strict=True, **options)
