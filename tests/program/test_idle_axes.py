"""An axis of the mesh that cuts nothing is named, with what to annotate."""

from __future__ import annotations

import pytest
import torch
from targets import mlp
from torch import nn

from shardc import Mesh, Pipeline, Zero, compile
from shardc.cli.main import main
from shardc.program.idle_axes import idle_axis_notes

OF_TP = "axis tp cuts nothing, so that its 2 ranks do the same work: annotate a weight with it, as up.weight: P('tp')"
OF_DP = (
    "axis dp cuts nothing, so that its 2 ranks do the same work: annotate the batch of an input with it, as x: P('dp')"
)


def test_an_axis_that_no_annotation_names_is_idle() -> None:
    model, args, kwargs, annotations = mlp()
    for names, notes in (((), (OF_DP, OF_TP)), (("x", "target"), (OF_TP,)), (("down.weight",), (OF_DP,))):
        own = {name: annotations[name] for name in names}
        program = compile(model, Mesh(dp=2, tp=2), own, args=args, kwargs=kwargs)
        assert idle_axis_notes(program.whole) == notes
        assert set(notes) <= set(program.whole.notes) and set(notes) <= set(program.program.notes)


def test_an_axis_that_cuts_stages_or_has_one_rank_is_not_idle() -> None:
    model, args, kwargs, annotations = mlp()
    assert not idle_axis_notes(compile(model, Mesh(pp=1, tp=1), {}, args=args, kwargs=kwargs).whole)
    pipeline = Pipeline(microbatches=2)
    assert not idle_axis_notes(compile(model, Mesh(pp=2), {}, args=args, kwargs=kwargs, pipeline=pipeline).whole)
    assert not idle_axis_notes(compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs).whole)


def test_an_axis_that_cuts_what_is_stored_alone_is_named() -> None:
    model, args, kwargs, _ = mlp()
    (note,) = idle_axis_notes(compile(model, Mesh(dp=2), {}, args=args, kwargs=kwargs, zero=Zero("dp", 3)).whole)
    assert note == OF_DP.replace("cuts nothing", "cuts what is stored and no op")


def test_layers_are_named_by_a_glob_and_sizes_that_do_not_divide_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 3))
    (note,) = idle_axis_notes(compile(model, Mesh(tp=2), {}, args=(torch.empty(4, 3),)).whole)
    assert note.endswith("as 0.weight: P('tp')")
    (note,) = idle_axis_notes(
        compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Mesh(tp=2), {}, args=(torch.empty(4, 4),)).whole
    )
    assert note.endswith("as *.weight: P('tp')")
    (note,) = idle_axis_notes(compile(model, Mesh(pp=2), {}, args=(torch.empty(4, 3),)).whole)
    assert note.endswith("cut the model into stages along it, by pipeline=Pipeline('pp') or --pipeline pp")
    (note,) = idle_axis_notes(compile(model, Mesh(tp=5), {}, args=(torch.empty(4, 3),)).whole)
    assert note.endswith("leave it out of the mesh, since no dim is as long and whole")


@pytest.mark.parametrize(
    "command",
    [["dump"], ["cost"], ["cost", "--symbol", "B=x.0"], ["explain", "up.weight"], ["check", "--fail-on", "fallback"]],
    ids=" ".join,
)
def test_every_command_says_it(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = command
    main([name, "targets:mlp", *rest, "--mesh", "dp=2,tp=2,sp=2"])
    line = "axis sp cuts nothing, so that its 2 ranks do the same work: annotate a weight with it, as "
    assert capsys.readouterr().out.count(line) == 1
    main([name, "targets:mlp", *rest, "--mesh", "dp=2,tp=2"])
    assert "cuts nothing" not in capsys.readouterr().out
