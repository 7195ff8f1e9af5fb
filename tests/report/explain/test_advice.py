"""Advice on removing a collective: a fresh compilation under the advised annotations confirms each claim."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import gpt
import moe
import pytest
import torch
import transformers
from cases import few
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardingError, Zero
from shardc.api import Compiled
from shardc.cli.main import main
from shardc.report.explain.advice import Advisor, advise
from shardc.report.explain.collectives import is_removed, transfers
from shardc.report.explain.records import Advice, Figures, Suggestion
from shardc.report.explain.retry import figures_of

Target = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any], Mapping[str, P]]
MESH = Mesh(dp=2, tp=2)


def gpt2(layers: int = 2) -> Target:
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=128, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.randint(128, (8, 32))
    weights = {f"transformer.h.*.{part}.c_proj.weight": P("tp") for part in ("attn", "mlp")}
    return model, (), {"input_ids": ids, "labels": ids}, {"input_ids": P("dp"), "labels": P("dp"), **weights}


def vit() -> Target:
    with torch.device("meta"):
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16,
            patch_size=4, num_labels=4,
        )  # fmt: skip
        model = transformers.ViTForImageClassification(config)
        images = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(4, (8,))}
    weights = {name: P(None, "tp") for name in vit_outputs(model)}
    return model, (), images, {name: P("dp") for name in images} | weights


def vit_outputs(model: nn.Module) -> set[str]:
    """The globs of the weights that end each half of a block."""
    ends = ("attention.output.dense.weight", "attention.o_proj.weight", "mlp.fc2.weight")
    names = [name for name, _ in model.named_parameters()]
    found = [name for name in names if name.endswith(ends)]
    found += [name for name in names if name.endswith(".output.dense.weight") and name not in found]
    assert found, names
    return {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in found}


GOOD: dict[str, tuple[Target, Mesh]] = {
    "gpt2": (gpt2(layers=1), MESH),
    "gpt, fsdp": (gpt.gpt_fsdp(), Mesh(dp=4)),
    "moe": (moe.moe(), Mesh(ep=4)),
    "vit": (vit(), MESH),
}


def compile(target: Target, mesh: Mesh, annotations: Mapping[str, P], **options: Any) -> Compiled:
    model, args, kwargs, _ = target
    return shardc.compile(model, mesh, annotations, args=args, kwargs=kwargs, **options)


def hold_all(target: Target, mesh: Mesh, compiled: Compiled, *names: str, **options: Any) -> list[Advice]:
    """Advice on every collective, or on those named, each held against a fresh compilation."""
    advisor, before, fresh = Advisor(compiled), figures_of(compiled.program), dict[Any, Compiled]()
    moved, found = transfers(compiled.whole), []
    for name in names or [each.name for each in compiled.collectives]:
        advice = advisor.advise(name)
        suggestion = advice.suggestion
        assert suggestion is not None, advice.text()
        if suggestion.change not in fresh:
            fresh[suggestion.change] = apply(target, mesh, suggestion, **options)
        after = fresh[suggestion.change]
        left = frozenset(each for one in transfers(after.whole).values() for each in one)
        assert is_removed(moved[name], left, altogether=not suggestion.is_free), advice.text()
        assert suggestion.is_free or not suggestion.instead
        hold(suggestion, before, figures_of(after.program))
        found.append(advice)
    return found


def apply(target: Target, mesh: Mesh, suggestion: Suggestion, **options: Any) -> Compiled:
    """As a person would: what is printed for Python, typed in."""
    said: dict[str, Any] = {"P": P, "Zero": Zero, "blocks": shardc.blocks}
    exec(suggestion.python.replace(", zero=", "; zero="), said)
    return compile(target, mesh, said["annotations"], **options | ({"zero": said["zero"]} if "zero" in said else {}))


def hold(suggestion: Suggestion, before: Figures, after: Figures) -> None:
    assert (suggestion.before, suggestion.after) == (before, after)
    is_good = after.wire_bytes < before.wire_bytes and after.peak <= before.peak and after.flops <= before.flops
    assert suggestion.is_free == (is_good and after.peak - after.optimizer <= before.peak - before.optimizer)


@pytest.mark.parametrize("name", few(GOOD, "gpt, fsdp"))
def test_advice_removes_each_collective_of_a_good_plan_at_the_cost_that_it_states(name: str) -> None:
    target, mesh = GOOD[name]
    found = hold_all(target, mesh, compile(target, mesh, target[3]))
    assert all(advice.why for advice in found if advice.suggestion and not advice.suggestion.is_free)


@pytest.mark.sweep
def test_advice_on_zero_trades_bytes_sent_for_memory() -> None:
    target = gpt.gpt()
    compiled = compile(target, Mesh(dp=2), gpt.DATA, zero=Zero("dp", 3))
    found = hold_all(target, Mesh(dp=2), compiled, zero=Zero("dp", 3))
    again = [each for each, made in zip(found, compiled.collectives, strict=True)
             if (made.kind, made.phase) == ("all_gather", "backward")]  # fmt: skip
    assert again
    for advice in again:
        assert advice.suggestion is not None and advice.suggestion.change == f"say zero={Zero('dp', 2)!r}", (
            advice.text()
        )


@pytest.mark.sweep
def test_advice_on_many_layers_uses_patterns_over_all_of_them() -> None:
    target = gpt2(layers=4)
    annotations = {**target[3], "transformer.h.*.mlp.c_fc.bias": P()}
    compiled = compile(target, MESH, annotations)
    of_third = [each.name for each in compiled.collectives if each.kind == "all_gather"][2]
    (advice,) = hold_all(target, MESH, compiled, of_third)
    assert advice.suggestion is not None
    assert advice.suggestion.change == "drop 'transformer.h.*.mlp.c_fc.bias': P()"


class WithLogits(nn.Module):
    """A GPT that returns its logits beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT(gpt.Config())

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


PLAIN, APART, FSDP = gpt.gpt(), gpt.gpt_separate_qkv(), gpt.gpt_fsdp()
LOGITS: Target = (WithLogits(), PLAIN[1], {}, PLAIN[3])
NO_DATA: Target = (*FSDP[:3], {"param:*": P("dp")})
BAD: dict[str, tuple[Target, dict[str, P], tuple[str, str, str], str]] = {
    "a bias cut that is added to what is whole": (
        PLAIN, {"*.mlp.down.bias": P("tp")}, ("forward", "all_gather", "tp"), "drop '*.mlp.down.bias': P('tp')"
    ),
    "a bias whole that is added to what is cut": (
        PLAIN, {"*.mlp.up.bias": P()}, ("backward", "all_gather", "tp"), "drop '*.mlp.up.bias': P()"
    ),
    "k whole beside q and v": (
        APART, {"*.attn.k.weight": P()}, ("backward", "all_gather", "tp"), "drop '*.attn.k.weight': P()"
    ),
    "k cut along the wrong dim": (
        APART, {"*.attn.k.weight": P(None, "tp")}, ("forward", "all_to_all", "tp"),
        "drop '*.attn.k.weight': P(None, 'tp')",
    ),
    "a head cut along its sum": (
        PLAIN, {"head.weight": P(None, "tp")}, ("forward", "all_reduce", "tp"),
        "change 'head.weight' from P(None, 'tp') to P('tp')",
    ),
    "logits asked for whole": (
        LOGITS, {"model.head.weight": P("tp"), "output:logits": P("dp")}, ("forward", "all_gather", "tp"),
        "change 'output:logits' from P('dp') to P('dp', None, 'tp')",
    ),
    "a batch on every rank beside weights that are stored in pieces": (
        NO_DATA, {}, ("backward", "all_reduce", "dp"), "add 'ids': P('dp')"
    ),
    "a batch that is annotated to be on every rank": (
        NO_DATA, {"ids": P()}, ("backward", "all_reduce", "dp"), "change 'ids' from P() to P('dp')"
    ),
    "targets cut along time": (
        PLAIN, {"targets": P(None, "dp")}, ("forward", "all_to_all", "dp"), "drop 'targets': P(None, 'dp')"
    ),
    "a module's output annotated to be whole": (
        PLAIN, {"module:blocks.*.mlp": P()}, ("forward", "all_gather", "dp"), "drop 'module:blocks.*.mlp': P()"
    ),
}  # fmt: skip


OBVIOUS = (
    "a bias whole that is added to what is cut",
    "k cut along the wrong dim",
    "logits asked for whole",
    "a batch on every rank beside weights that are stored in pieces",
    "a module's output annotated to be whole",
)


@pytest.mark.parametrize("name", few(BAD, *OBVIOUS))
def test_advice_on_a_bad_plan_is_the_obvious_change(name: str) -> None:
    target, added, (phase, kind, axis), expected = BAD[name]
    mesh, annotations = Mesh(dp=4) if target is NO_DATA else MESH, {**target[3], **added}
    compiled = compile(target, mesh, annotations)
    is_meant = [(each.phase, each.kind, axis in each.axes) == (phase, kind, True) for each in compiled.collectives]
    meant = [each for each, known in zip(compiled.collectives, is_meant, strict=True) if known]
    advisor = Advisor(compiled)
    found = (advisor.advise(each.name).suggestion for each in meant)
    good = next(each for each in found if each is not None and each.change == expected)
    assert good.after.wire_bytes < good.before.wire_bytes
    hold(good, figures_of(compiled.program), figures_of(apply(target, mesh, good).program))


class Annotating(nn.Module):
    """Says in itself how a value lies, and there wrongly; ``is_plain``: it does not."""

    def __init__(self, is_plain: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.is_plain = nn.Linear(64, 256), nn.Linear(256, 64), is_plain

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden if self.is_plain else shardc.annotate(hidden, P("dp"))).square().sum()


def test_an_annotation_in_the_model_may_be_the_one_to_take_out() -> None:
    annotations = {"x": P("dp"), "down.weight": P(None, "tp")}
    target, plain = ((Annotating(is_plain), (torch.randn(32, 64),), {}, annotations) for is_plain in (False, True))
    compiled = compile(target, MESH, annotations)
    gathered = [each for each in compiled.collectives if each.kind == "all_gather"]
    found = advise(compiled, gathered[0].name)
    assert found.suggestion is not None and found.suggestion.is_free
    said = found.suggestion.change
    assert said.startswith("take out of the model shardc.annotate(..., P('dp')) at test_advice.py:"), said
    assert figures_of(compile(plain, MESH, annotations).program) == found.suggestion.after


@pytest.mark.sweep
def test_in_a_pipeline_advice_changes_stages_for_sends_and_annotations_for_reductions() -> None:
    target, pipeline = gpt.gpt_tied(), shardc.Pipeline(axis="pp", microbatches=4)
    compiled = compile(target, Mesh(dp=2, pp=2), gpt.DATA, pipeline=pipeline)
    tied = next(each for each in compiled.collectives if each.name.startswith("send_after"))
    advice = advise(compiled, tied.name)
    assert advice.suggestion is not None and "between stages go 0 B" in advice.text(), advice.text()
    summed = next(each for each in compiled.collectives if each.kind == "all_reduce" and each.stage == 1)
    found = advise(compiled, summed.name).suggestion
    assert found is not None and found.after.flops > found.before.flops


def test_no_more_is_compiled_than_was_allowed_and_what_is_no_collective_is_named() -> None:
    target = gpt.gpt()
    compiled = compile(target, MESH, target[3])
    assert [advise(compiled, compiled.collectives[0].name, tries).tried for tries in (1, 3)] == [1, 3]
    with pytest.raises(ShardingError, match="did you mean all_reduce_tp"):
        advise(compiled, "all_reduce_tpp")


def test_the_advice_reads_as_one_would_type_it() -> None:
    target = LOGITS
    compiled = compile(target, MESH, {**target[3], "model.head.weight": P("tp"), "output:logits": P("dp")})
    gathered = next(each for each in compiled.collectives if each.kind == "all_gather")
    text = advise(compiled, gathered.name).text()
    assert text.startswith("to remove it: change 'output:logits' from P('dp') to P('dp', None, 'tp')\n"), text
    assert "  on command line  --annotate 'output:logits=dp,-,tp'\n" in text
    assert "  a rank then sends 852.2 kB, 65.5 kB less a step\n" in text


@pytest.mark.sweep
@pytest.mark.parametrize("pattern, spec", [
    ("*.mlp.up.bias", P()), ("output:logits", P())
])  # fmt: skip
def test_what_is_left_open_on_the_command_line_is_as_if_it_were_dropped(pattern: str, spec: P) -> None:
    without = {name: each for name, each in LOGITS[3].items() if name != pattern}
    dropped, opened = compile(LOGITS, MESH, without), compile(LOGITS, MESH, without | {pattern: P(...)})
    assert figures_of(compile(LOGITS, MESH, without | {pattern: spec}).program) != figures_of(dropped.program)
    assert figures_of(opened.program) == figures_of(dropped.program)


def test_the_advice_on_a_collective_is_golden(golden: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "gpt:gpt", "--mesh", "tp=2", "--annotate", "*.mlp.up.bias=-", "all_gather_tp"]
    assert main(command) == 0
    golden("advice.txt", capsys.readouterr().out)
    assert main([*command, "--no-advice", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["advice"], record["alternatives"][0]["way"]) == (None, "all_gather")
