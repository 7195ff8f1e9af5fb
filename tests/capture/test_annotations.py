"""Annotations: which values a pattern matches, what it specifies, and the errors of wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardc.capture.annotations import match, resolve
from shardc.capture.capture import capture
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.program.program import Pin

MESH = Mesh(dp=2, tp=4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.h = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(
        self, batch: dict[str, Tensor], *xs: Tensor, mask: Tensor | None = None, **kw: Tensor
    ) -> dict[str, Any]:
        x = self.embed(batch["ids"]) * self.scale
        for layer in self.h:
            x = x + layer(x)
        logits = self.head(x) + sum(value.sum() for value in (*xs, *kw.values()))
        return {"loss": logits.mean(), "logits": logits, "embed": x}


ARGS = ({"ids": torch.zeros(4, 6, dtype=torch.int64)}, torch.zeros(8), torch.zeros(4))
KWARGS = {"bias": torch.zeros(4, 2)}


def pins(annotations: Mapping[str, Any], mesh: Mesh = MESH) -> dict[tuple[str, str], Pin]:
    model = Model()
    matched = match(annotations, model, ARGS, KWARGS, mesh)
    captured = capture(model, ARGS, KWARGS, modules=matched.modules)
    found = resolve(captured.program, matched, mesh)
    return {(pin.kind, pin.name): pin for pin in found}


def error(annotations: Mapping[str, Any]) -> str:
    with pytest.raises(ShardingError) as raised:
        pins(annotations)
    return str(raised.value)


def test_a_pattern_is_a_glob_over_parameters_and_buffers():
    found = pins({"h.*.weight": P("tp", None), "scale": P("tp")})
    assert list(found) == [("parameter", "h.0.weight"), ("parameter", "h.1.weight"), ("buffer", "scale")]
    pin = found["parameter", "h.1.weight"]
    assert pin.sharding == P("tp", None).sharding(MESH, (8, 8), "")
    assert pin.text == "h.*.weight: P('tp', None)"


def test_inputs_are_named_by_path_and_keyword():
    found = pins({"batch.ids": P("dp"), "xs.1": P("dp"), "kw.bias": P("dp")})
    assert list(found) == [("input", "batch.ids"), ("input", "xs.1"), ("input", "bias")]
    assert list(pins({"bias": P("dp")})) == [("input", "bias")]


def test_open_dims_and_priority_are_kept():
    pin = pins({"batch.ids": P("dp", ..., priority=3)})["input", "batch.ids"]
    assert (pin.open, pin.priorities) == (frozenset({1}), (3, 0))
    assert pins({"embed.weight": P(P.OPEN, "tp")})["parameter", "embed.weight"].open == frozenset({0})


def test_either_name_of_a_tied_parameter_will_do():
    found = pins({"head.weight": P("tp")})
    assert list(found) == [("parameter", "embed.weight")]
    assert list(pins({"*.weight": P("tp")})) == [
        ("parameter", "embed.weight"), ("parameter", "h.0.weight"), ("parameter", "h.1.weight"),
    ]  # fmt: skip


def test_modules_are_matched_for_capture_and_get_no_pin():
    model = Model()
    matched = match({"h.?": P("dp")}, model, ARGS, KWARGS, MESH)
    assert {path: entry.spec for path, entry in matched.modules.items()} == {"h.0": P("dp"), "h.1": P("dp")}
    assert not pins({"h.?": P("dp")})


def test_outputs_are_named_with_their_prefix():
    assert list(pins({"output:log*": P("dp")})) == [("output", "logits")]
    found = pins({"output:embed": P(), "module:embed": P("dp")})
    assert [(pin.kind, pin.name) for pin in found.values()] == [("output", "embed")]
    assert found["output", "embed"].sharding.is_replicated


def test_placements_of_dtensor_say_the_same():
    placements = [Shard(0), Shard(0)]
    assert pins({"embed.weight": placements})["parameter", "embed.weight"].sharding == (
        P(("dp", "tp")).sharding(MESH, (16, 8), "")
    )
    found = pins({"h.0.weight": (Replicate(), Shard(1)), "h.1.weight": (Replicate(), Replicate())})
    assert found["parameter", "h.0.weight"].sharding == P(None, "tp").sharding(MESH, (8, 8), "")
    assert found["parameter", "h.1.weight"].sharding.is_replicated


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([Shard(0)], "1 placement for the 2 axes of Mesh(dp=2, tp=4)"),
        ([Shard(-1), Replicate()], "only Shard with a dim of 0 or more and Replicate say how a value lies"),
        ([Partial(), Replicate()], "only Shard with a dim of 0 or more and Replicate say how a value lies"),
        ("dp", "an annotation is a P or a sequence of DTensor placements"),
    ],
)
def test_an_annotation_that_is_no_sharding_is_refused(given, problem):
    assert error({"embed.weight": given}).splitlines()[1].strip() == problem


def test_a_pattern_without_a_match_names_near_ones():
    assert error({"h.0.wieght": P("tp")}) == (
        "annotation 'h.0.wieght': a pattern over 17 names (param, input, module)\n"
        "  it matches nothing\n"
        "  did you mean h.0.weight or h.1.weight or head.weight?"
    )
    assert "did you mean batch.ids?" in error({"input:batch": P("dp")})
    assert "did you mean logits?" in error({"output:logit": P("dp")})


def test_an_argument_without_a_tensor_is_named_with_its_type():
    for value, kind in ((numpy.ones((4, 8), numpy.float32), "ndarray"), ([1.0, 2.0], "list"), (3, "int")):
        with pytest.raises(ShardingError) as raised:
            match({"input": P("dp")}, nn.Linear(8, 8), (value,), {}, MESH)
        assert str(raised.value) == (
            f"annotation 'input': 'input' of type {kind}\n"
            "  there is no tensor in this argument\n"
            "  torch.as_tensor makes one of it"
        )


def test_all_patterns_without_a_match_are_named_at_once():
    text = error({"nothing": P("tp"), "h.9.weight": P("tp"), "scale": P("tp")})
    assert text.startswith("2 problems:\nannotation 'nothing'") and "annotation 'h.9.weight'" in text


def test_a_pattern_over_several_kinds_needs_a_prefix():
    assert error({"h.1*": P("dp")}) == (
        "annotation 'h.1*': it matches the param 'h.1.weight' and the module 'h.1'\n"
        "  these are values of several kinds\n"
        "  write 'param:h.1*' or 'module:h.1*'"
    )
    assert len(pins({"param:h.1*": P("dp")})) == 2


def test_an_unknown_prefix_is_named():
    assert "a prefix is one of param:, input:, module:, output:\n  did you mean param?" in error({"params:x": P()})


def test_two_patterns_that_disagree_are_both_named():
    assert error({"h.*.weight": P("tp"), "h.0.weight": P(None, "tp")}) == (
        "parameter 'h.0.weight': h.*.weight: P('tp'), and h.0.weight: P(None, 'tp')\n"
        "  two annotations say different things of one value\n"
        "  make the patterns disjoint, or the specs equal"
    )
    assert "embed.weight: P('tp'), and head.weight: P('dp')" in error({"embed.weight": P("tp"), "head.weight": P("dp")})
    assert "output:l*: P(), and output:loss: P('dp')" in error({"output:l*": P(), "output:loss": P("dp")})
    assert len(pins({"h.*.weight": P("tp"), "h.0.weight": P("tp")})) == 2


def test_an_input_of_another_shape_than_annotated_is_named_by_path():
    assert error({"batch.ids": P("dp", None, "tp")}) == (
        "input 'batch.ids': P('dp', None, 'tp') on shape [4, 6]\n  3 entries for 2 dims\n  write at most 2 entries"
    )


def test_axes_that_are_unknown_or_used_twice_are_refused():
    assert "did you mean tp?" in error({"scale": P("tq")})
    assert "an axis can cut one dim of a value, once" in error({"embed.weight": P("tp", "tp")})


def test_the_value_and_the_pattern_are_named_and_all_offenders_at_once():
    assert error({"param:*": P(None, "tp")}) == (
        "parameter 'h.0.bias' (annotated by 'param:*'): P(None, 'tp') on shape [8]\n"
        "  2 entries for 1 dim\n"
        "  write at most 1 entry\n"
        "  likewise parameter 'h.1.bias' (annotated by 'param:*'), buffer 'scale' (annotated by 'param:*')"
    )


class Optional(nn.Module):
    """Its targets may be left out, its mask may be None inside of a dict."""

    def forward(self, x: Tensor, targets: Tensor | None = None, more: dict[str, Tensor] | None = None) -> Tensor:
        return x.mean() if targets is None else (x - targets).mean()


@pytest.mark.parametrize("given", [(), (None,)], ids=["absent", "None"])
def test_annotations_of_optional_arguments_wait_until_they_are_given(given: tuple[None, ...]) -> None:
    annotations = {"x": P("dp"), "targets": P("dp"), "input:more.mask": P("dp"), "more.*": P()}
    found = match(annotations, Optional(), (torch.ones(8), *given), {}, MESH)
    assert [entry.name for entry in found.entries] == ["x"]
    found = match(annotations, Optional(), (torch.ones(8), torch.ones(8)), {}, MESH)
    assert [entry.name for entry in found.entries] == ["x", "targets"]


@pytest.mark.parametrize("pattern", ["target", "param:targets", "output", "module:targets", "mask"])
def test_a_name_of_no_optional_argument_is_still_an_error(pattern: str) -> None:
    with pytest.raises(ShardingError, match="it matches nothing"):
        match({pattern: P("dp")}, Optional(), (torch.ones(8),), {}, MESH)
