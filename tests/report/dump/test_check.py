"""Budgets: how they are read, what exceeds them, and what ``shardc check`` prints."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from targets import mlp

from shardc import Mesh, Pipeline, compile
from shardc.cli.main import main
from shardc.costs.records import TimeEntry
from shardc.language.errors import UsageError
from shardc.language.record import json_of, read
from shardc.report.dump.budget import KINDS, SUBJECTS, UNITS, Budget, measure
from shardc.report.dump.program_record import program_record
from shardc.report.dump.records import Dump


def entry(kind: str, wire_bytes: int, axes: tuple[str, ...] = ("tp",), phase: str = "forward", **more: Any) -> Any:
    where = {"phase": phase, "node": "dot", "source": "m.py:7", "cause": "so it is"}
    shapes = {"dtype": "float32", "local_shape_in": [wire_bytes // 4], "local_shape_out": [wire_bytes // 4]}
    counts = {"bytes": wire_bytes, "wire_bytes": wire_bytes, "wire_bytes_total": 8 * wire_bytes}
    return {"id": kind, "kind": kind, "axes": list(axes), **shapes, **counts, **where, **more}


RECORD: dict[str, Any] = {
    "version": 1,
    "level": "lowered",
    "mesh": {"dp": 2, "tp": 4},
    "collectives": [
        entry("all_gather", 3000),
        entry("all_gather", 500, ("tp:(2)2",), "backward", stage=0, times=4),
        entry("all_reduce", 1000, ("dp", "tp"), "backward"),
    ],
    **{key: [] for key in ("parameters", "buffers", "inputs", "outputs", "stages", "nodes")},
    "fallbacks": [
        {
            "name": "places",
            "op": "places",
            "type": "f32[8]",
            "operands": ["x"],
            "phase": "forward",
            "module": "",
            "source": "m.py:3",
        }
    ],
    "notes": [],
    "memory": {"parameters": 10, "gradients": 10, "optimizer": 20, "saved": 5, "gathered": 0, "peak": 40},
    "time": {"step": 0.05},
    "flops": {"per_rank": 2000, "whole": 8000},
}


DUMP: Dump = read(Dump, RECORD)
assert json_of(DUMP) == RECORD


@pytest.mark.parametrize(
    ("text", "broken", "count"),
    [
        ("all_gather>2kB", True, 1),
        ("all_gather>3kB", False, 0),
        ("all_gather>=3kB", True, 1),
        ("all_gather > 2.5 kb", True, 1),
        ("all_gather>1KiB", True, 1),
        ("collectives>400B", True, 3),
        ("all_gather", True, 2),
        ("reduce_scatter", False, 0),
        ("all_gather>4", True, 2),
        ("all_gather>5", False, 0),
        ("collectives>=6", True, 3),
        ("all_gather@dp", False, 0),
        ("collectives@dp", True, 1),
        ("all_gather/backward", True, 1),
        ("collectives@tp/backward>500B", True, 1),
        ("wire>5kB", True, 3),
        ("wire>6000", False, 0),
        ("wire>=6000", True, 3),
        ("wire/all_gather>4999", True, 2),
        ("wire@tp/forward/all_gather>3000", False, 0),
        ("peak>39", True, 0),
        ("memory>39B", True, 0),
        ("memory>40B", False, 0),
        ("flops>1e3", True, 0),
        ("note", False, 0),
        ("step>40ms", True, 0),
        ("step>0.05s", False, 0),
        ("step>=50000us", True, 0),
    ],
)
def test_a_budget_is_broken_by_more_than_it_allows(text: str, broken: bool, count: int) -> None:
    found = measure(Budget.parse(text), DUMP)
    assert (found.is_broken, len(found.collectives)) == (broken, count)


def test_ops_without_a_rule_break_a_budget_of_them() -> None:
    found = measure(Budget.parse("fallback"), DUMP)
    assert found.is_broken and found.fallbacks == DUMP.fallbacks
    assert not measure(Budget.parse("fallback>1"), DUMP).is_broken


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all_gahter>1MB", "'all_gahter'\n  there is no budget of this\n  did you mean all_gather"),
        ("wire>5XB", "'XB'\n  it is no unit of bytes\n  did you mean"),
        ("wire>lots", "'lots'\n  it is no amount\n  write a number and a unit, as 10MB, or a number alone"),
        ("wire", "wire with no amount\n  there is always some\n  write wire>8GB"),
        ("fallback>3MB", "fallback in MB\n  it is counted, and has no bytes\n  write fallback>3"),
        ("collectives<3", "'<'\n  a budget is broken by more than an amount\n  write > or >="),
        ("all_gather/bckward", "it is no phase and no kind of collective\n  did you mean backward"),
        ("step>50mss", "'mss'\n  it is no unit of time\n  did you mean ms"),
        ("step", "step with no amount\n  there is always some\n  write step>50ms"),
        ("fallback@tp", "only collectives have an axis, a phase or a kind\n  write fallback alone"),
        ("wire@dp@tp>1", "a budget is of one axis\n  write a budget for each"),
        ("10MB", "there is no budget of this"),
        ("", "write all_gather>10MB"),
    ],
)
def test_a_budget_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Budget.parse(text)
    assert message in str(error.value) and str(error.value).startswith(f"budget {text!r}: ")


def test_a_budget_that_a_dump_cannot_answer_says_why() -> None:
    for text, record, message in (
        ("wire@pp>1", RECORD, "mesh dp=2, tp=4\n  it has no axis 'pp'\n  did you mean"),
        ("fallback", {**RECORD, "fallbacks": []} | {"only": "memory"}, ""),
        ("peak>1", {key: RECORD[key] for key in ("version", "level", "mesh")} | {"only": "stages"}, "it has no memory"),
        ("step>1s", {key: value for key, value in RECORD.items() if key != "time"}, "compile it with --links"),
        ("wire>1", {**RECORD, "level": "agreed"}, "a program that is agreed\n  it has no collectives yet"),
    ):
        if message:
            with pytest.raises(UsageError) as error:
                measure(Budget.parse(text), read(Dump, record))
            assert message in str(error.value)
        else:
            assert not measure(Budget.parse(text), read(Dump, record)).is_broken


def test_every_subject_and_unit_is_read_and_held_against_a_compiled_pipeline() -> None:
    model, args, kwargs, annotations = mlp()
    compiled = compile(
        model, Mesh(dp=2, tp=2, pp=1), annotations, args=args, kwargs=kwargs, pipeline=Pipeline(microbatches=2)
    )
    record = replace(program_record(compiled.whole), time=TimeEntry(0.01))
    for subject in SUBJECTS:
        assert measure(Budget.parse(f"{subject}>=0B" if subject in KINDS else f"{subject}>=0"), record).found
        assert not measure(Budget.parse(f"{subject}>1e15"), record).is_broken
    for unit, count in UNITS.items():
        assert Budget.parse(f"wire>2{unit}").limit == 2 * count
    sent = sum(each.wire_bytes * (each.times or 1) for each in record.collectives or ())
    assert measure(Budget.parse(f"wire>={sent}"), record).is_broken
    assert not measure(Budget.parse(f"wire>{sent}"), record).is_broken


def test_check_prints_what_breaks_each_budget_and_what_holds(
    capsys: pytest.CaptureFixture[str], golden: Callable[..., None]
) -> None:
    budgets = ["fallback", "all_gather@dp>100B", "wire>1MB", "note", "collectives>20"]
    command = ["check", "targets:weighed", "--mesh", "dp=2,tp=2", *(f"--fail-on={each}" for each in budgets)]
    assert main([*command, "--max-memory", "8GB"]) == 1
    golden("check.txt", capsys.readouterr().out)


def test_check_takes_a_dump_in_place_of_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(RECORD))
    assert main(["check", str(path), "--fail-on", "fallback>1", "--max-memory", "1kB"]) == 0
    assert capsys.readouterr().out == (
        "holds   fallback>1: 1 of them\n"
        "holds   memory>1kB: 40 B of one rank at the peak, with 20 B of the optimizer\n"
        "none of 2 budgets broken\n"
    )
    assert main(["check", str(path), "--fail-on", "wire>1kB", "--fail-on", "note", "--format", "json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["is_broken"] and [each["is_broken"] for each in record["budgets"]] == [True, False]
    assert record["budgets"][0]["collectives"] == RECORD["collectives"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["targets:weighed", "--mesh", "dp=2"], "there is no budget to hold"),
        (["targets:weighed", "--fail-on", "fallback"], "a target is compiled for a mesh"),
        (["nowhere.json", "--fail-on", "fallback"], "it cannot be read\n  write one with shardc dump"),
        (["targets:weighed", "--max-memory", "8XB"], "argument --max-memory: '8XB': 'XB'\n  it is no unit"),
    ],
)
def test_mistakes_of_check_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["check", *argv])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and message in err and not out
