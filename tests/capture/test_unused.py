"""An annotation without effect has a note in the dump; strict refuses one that matches no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Local, Mesh, P, Pipeline, ShardingError
from shardc.cli.main import main

MESH = Mesh(dp=2, tp=2)
SAME = "without it every value lies the same; leave it out, or cut something by it"
NOT_CALLED = (
    "the model does not call 'spare', or nothing that it returns is a tensor; leave it out, or annotate what is in "
    "the model"
)
REPEATED = "what it names has an annotation already, which says the same; leave it out, or annotate something else"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).pow(2).mean()


def compile(annotations: dict[str, Any], **options: Any) -> shardc.Compiled:
    return shardc.compile(Net(), MESH, annotations, args=(torch.zeros(4, 8), torch.zeros(4, 8)), **options)


NOTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "annotations that others follow": ({"x": P("dp"), "down.weight": P(None, "tp")}, []),
    "a whole value that would be cut": ({"x": P("dp"), "y": P()}, []),
    "a whole value that nothing cuts": (
        {"x": P("dp"), "up.bias": P()}, [f"annotation up.bias: P() has no effect: {SAME}"],
    ),
    "an input that an annotation of a module speaks for": (
        {"x": P("dp"), "up": P("dp", "tp")}, [f"annotation x: P('dp') has no effect: {SAME}"],
    ),
    "two, of which one would be cut": (
        {"x": P("dp"), "y": P(), "up.bias": P()}, [f"annotation up.bias: P() has no effect: {SAME}"],
    ),
    "a value that is left open": ({"x": P("dp"), "y": P(...)}, [f"annotation y: P(...) has no effect: {SAME}"]),
    "a parameter that no one else reads": ({"x": P("dp"), "spare.weight": P("tp")}, []),
    "a module that is not called": (
        {"x": P("dp"), "spare": P("dp")}, [f"annotation spare: P('dp') has no effect: {NOT_CALLED}"],
    ),
    "a module that is called": ({"x": P("dp"), "up": P(None, "tp")}, []),
    "the same again": (
        {"x": P("dp"), "*.weight": P("tp"), "up.weight": P("tp")},
        [f"annotation up.weight: P('tp') has no effect: {REPEATED}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_an_annotation_without_effect_has_a_note(name: str) -> None:
    annotations, expected = NOTES[name]
    program = compile(annotations)
    notes = [note for note in program.program.notes if "no effect" in note]
    assert notes == expected
    assert all(note in program.dump() for note in notes)
    for note in notes:  # what it says is so
        text = note.removeprefix("annotation ").partition(":")[0]
        rest = {pattern: spec for pattern, spec in annotations.items() if pattern != text}
        assert compile(rest).shardings == program.shardings


def test_an_annotation_without_effect_has_a_note_in_a_pipeline_too() -> None:
    program = compile({"x": P("tp"), "up.bias": P()}, pipeline=Pipeline("dp", 2))
    assert program.program.notes == (f"annotation up.bias: P() has no effect: {SAME}",)


def test_strict_refuses_an_annotation_without_effect() -> None:
    with pytest.raises(ShardingError) as raised:
        compile({"x": P("dp"), "spare": P("dp")}, strict=True)
    assert str(raised.value) == (
        "annotation spare: P('dp'): the output of a module\n"
        "  the model does not call 'spare', or nothing that it returns is a tensor\n"
        "  leave it out, or annotate what is in the model"
    )
    compile({"x": P("dp"), "up.bias": P()}, strict=True)


OF_GROUPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a module": ({"up": P("tp")}, ["up: P('tp')"]),
    "modules that a pattern matches": ({"module:*": P(None, "tp")}, ["module:*: P(None, 'tp')"]),
    "an output": ({"output:*": P("tp")}, ["output:*: P('tp')"]),
    "another axis too": ({"up": P(("tp", "dp"))}, []),
    "no axis of groups": ({"up": P(None, "dp")}, []),
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_an_annotation_that_cuts_what_each_group_has_of_its_own_has_a_note(name: str) -> None:
    annotations, idle = OF_GROUPS[name]
    given = {"x": P(("tp", "dp")), "y": P(("tp", "dp")), **annotations}
    program = compile(given, local=Local("tp", 4))
    why = "groups along tp compute it each by itself; leave it out, or cut it by another axis"
    notes = [note for note in program.program.notes if "no effect" in note]
    assert notes == [f"annotation {text} has no effect: {why}" for text in idle]
    if idle:
        with pytest.raises(ShardingError, match=r"groups along tp compute it each by itself\n  leave it out"):
            compile(given, local=Local("tp", 4), strict=True)


@pytest.mark.parametrize("command", ["dump", "verify"])
def test_every_command_that_compiles_is_strict_where_it_is_told(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"{Path(__file__).parents[1] / 'support/targets.py'}:weighed", "--mesh", "dp=2,tp=2"]
    assert main([command, *target]) == 0
    assert main([command, *target, "--strict"]) == 4
    assert "targets.places.default has no rule" in capsys.readouterr().err
