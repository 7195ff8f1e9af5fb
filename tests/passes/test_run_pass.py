"""A fault of shardc names the pass, the op and the user's line; where a rule of its own fails, the op runs whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from printed import compiled, printed, value
from torch import Tensor

import shardc
from shardc import Mesh, P, ShardingError
from shardc.language.errors import InternalError
from shardc.ops import RULES
from shardc.passes.canonicalize import scans
from shardc.passes.order import PASSES, Pass, run_passes
from shardc.program.program import Program

MESH = Mesh(dp=2)
aten = torch.ops.aten


def flipped(x: Tensor) -> Tensor:
    return x.flip(0).sin()


def failing(*_: Any) -> Any:
    return ()[0]


def test_where_a_rule_fails_the_op_runs_whole_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.flip.default, replace(RULES[aten.flip.default], bind=failing))
    program = compiled(flipped, MESH, {"x": P("dp")}, x=value(8, 4))
    note = next(note for note in program.program.notes if "flip" in note)
    assert note.startswith("aten.flip.default (test_run_pass.py:")
    assert note.endswith(
        ") runs whole: its rule raised IndexError: tuple index out of range; this is a fault of shardc: please report "
        "it, with the traceback, the model and the annotations"
    )
    assert note in program.dump()


def test_a_pass_that_fails_names_itself_the_op_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewrite(program: Program, node: Any) -> Any:
        return failing()

    monkeypatch.setitem(scans.SCANS, aten.flip.default, rewrite)
    with pytest.raises(InternalError) as error:
        compiled(flipped, MESH, {"x": P("dp")}, x=value(8, 4))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("pass canonicalize: at aten.flip.default, test_run_pass.py:")
    assert lines[1:] == [
        "  IndexError: tuple index out of range",
        "  this is a fault of shardc: please report it, with the traceback, the model and the annotations",
    ]
    assert isinstance(error.value.__cause__, IndexError)


def test_a_function_of_the_users_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.flip.default, RULES[aten.flip.default])
    shardc.register_rule(aten.flip.default, failing, override=True)
    with pytest.raises(ShardingError) as error:
        compiled(flipped, MESH, {"x": P("dp")}, x=value(8, 4))
    assert str(error.value) == (
        "register_rule(aten.flip.default): spec of operands [8, 4]\n  it raised IndexError: tuple index out of range\n"
        "  let it return the text of a rule, or None"
    )


def texts_of_run(keep: tuple[Pass, ...]) -> tuple[list[tuple[str, Program, str]], str]:
    """Each pass, its program and how that printed right after it; and how the last one printed."""
    first, seen = compiled(flipped, MESH, {"x": P("dp")}, x=value(8, 4)).after["capture"], []
    before = printed(first)
    last = run_passes(first, lambda name, program, _: seen.append((name, program, printed(program))), keep=keep)
    assert printed(first) == before, "the first program is never changed"
    return seen, printed(last)


def test_programs_that_are_kept_are_not_changed_by_later_passes() -> None:
    kept, last = texts_of_run(PASSES)
    assert [(name, printed(program)) for name, program, _ in kept] == [(name, text) for name, _, text in kept]
    passing, last_of_passing = texts_of_run(())
    assert [text for *_, text in passing] == [text for *_, text in kept] and last_of_passing == last
