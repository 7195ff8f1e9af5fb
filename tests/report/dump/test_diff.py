"""diff of two dumps: matched collectives, and everything that changed."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpt import GPT, Config, gpt, plan
from targets import mlp

from shardc import Compiled, Mesh, P, Pipeline, Zero, compile
from shardc.cli.main import main
from shardc.language.record import json_of, read
from shardc.report.dump.diff import diff, diff_text, is_same, matched
from shardc.report.dump.program_record import program_record
from shardc.report.dump.records import Difference, Dump

pytestmark = pytest.mark.xdist_group("diff")  # who shares what is made once
ON_FOUR = ["--mesh", "dp=2,tp=2"]


def dumped(**options: Any) -> dict[str, Any]:
    model, args, kwargs, annotations = mlp()
    given = {"mesh": Mesh(dp=2, tp=2), "annotations": annotations, **options}
    compiled = compile(model, given.pop("mesh"), given.pop("annotations"), args=args, kwargs=kwargs, **given)
    return written(compiled)


def written(compiled: Compiled) -> dict[str, Any]:
    """A dump as a file has it."""
    record = program_record(compiled.whole)
    found: dict[str, Any] = json.loads(json.dumps(json_of(record)))
    assert read(Dump, found) == record
    return found


def compared(before: dict[str, Any], after: dict[str, Any]) -> Difference:
    return diff(read(Dump, before), read(Dump, after))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return dumped()


def gpt_of(layers: int) -> dict[str, Any]:
    _, args, _, _ = gpt()
    compiled = compile(GPT(Config(layers=layers)), Mesh(dp=2, tp=2), plan(Mesh(dp=2, tp=2)), args=args)
    return written(compiled)


def test_a_dump_is_the_same_as_itself(plain: dict[str, Any]) -> None:
    found = compared(plain, copy.deepcopy(plain))
    assert found == Difference() and json_of(found) == {"version": 1}
    assert diff_text(found) == "no difference\n"


def test_names_that_shift_make_no_difference(plain: dict[str, Any]) -> None:
    """A dump is the same where only nodes are called otherwise."""
    text = json.dumps(plain).replace("dot_", "dot_1").replace("all_reduce_dp", "all_reduce_dp_7")
    found = compared(plain, json.loads(text))
    assert is_same(found), found


def test_one_more_layer_adds_exactly_its_collectives() -> None:
    two, three = gpt_of(2), gpt_of(3)
    found = json_of(compared(two, three))["collectives"]
    assert not found["went"] and {each["axes"][0] for each in found["came"]} == {"tp"}
    assert len(found["came"]) == 4 and all("blocks.2" in each["cause"] for each in found["came"])
    assert [(each["before"]["axes"], each["after"]["phase"]) for each in found["changed"]] == [(["dp"], "backward")]
    back = json_of(compared(three, two))["collectives"]
    assert back["went"] == found["came"] and not back["came"]


def test_a_changed_sharding_is_printed_with_both_shardings(plain: dict[str, Any]) -> None:
    _, _, _, annotations = mlp()
    found = compared(plain, dumped(annotations={**annotations, "up.weight": P()}))
    entries = json_of(found)["parameters"]
    names = {each["name"]: (each["before"]["sharding"], each["after"]["sharding"]) for each in entries}
    assert names["up.weight"] == ("f32[32@tp, 8]", "f32[32, 8]")
    text = diff_text(found)
    assert "\nup.weight  f32[32@tp, 8], [16, 8] on one rank  f32[32, 8], [32, 8] on one rank\n" in text


def test_totals_are_those_of_both_dumps(plain: dict[str, Any]) -> None:
    found = json_of(compared(plain, dumped(zero=Zero("dp", 3))))["collectives"]["totals"]
    assert [each["phase"] for each in found][-1] == "" and len(found) > 2
    for name in ("bytes", "wire_bytes"):
        every = [sum(each[name] for each in dump["collectives"]) for dump in (plain, dumped(zero=Zero("dp", 3)))]
        assert found[-1][name] == every
        rows = [each[name][1] - each[name][0] for each in found[:-1]]
        assert sum(rows) == every[1] - every[0]


def test_a_pipeline_has_other_axes_stages_and_a_schedule(plain: dict[str, Any]) -> None:
    piped = dumped(mesh=Mesh(dp=2, pp=2), annotations={"x": P("dp")}, pipeline=Pipeline(microbatches=2))
    difference = compared(plain, piped)
    found = json_of(difference)
    assert found["mesh"] == [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
    assert [stage["stage"] for stage in found["stages"]] == [0, 1] and found["schedule"]["name"] == [None, "1f1b"]
    text = diff_text(difference)
    assert text.startswith("mesh: dp=2,tp=2 -> pp=2,dp=2\n") and "\nstage 0 " in text and "send" in text
    other = dumped(mesh=Mesh(dp=2, pp=2), annotations={"x": P("dp")}, pipeline=Pipeline(microbatches=4))
    sends = [
        each for each in json_of(compared(piped, other))["collectives"]["changed"] if each["before"]["kind"] == "send"
    ]
    assert {(each["before"]["times"], each["after"]["times"]) for each in sends} == {(2, 4)}


def _renamed(record: dict[str, Any]) -> None:
    record["collectives"][0]["kind"] = "all_gather"


def _bigger(record: dict[str, Any]) -> None:
    record["collectives"][0]["wire_bytes"] *= 2


def _fewer_notes(record: dict[str, Any]) -> None:
    record["notes"] = ["one"]


def _fallback(record: dict[str, Any]) -> None:
    record["fallbacks"] = [record["nodes"][8]]


def _flops(record: dict[str, Any]) -> None:
    record["flops"]["whole"] = None


@pytest.mark.parametrize(
    ("change", "key", "line"),
    [
        (_renamed, "collectives", "\n+           all_gather  tp    forward  all_reduce_tp  "),
        (
            _bigger,
            "collectives",
            "grew        all_reduce  tp    forward  all_reduce_tp  float32[4, 8]  128 B -> 256 B  ",
        ),
        (_fewer_notes, "notes", "+  one"),
        (_fallback, "fallbacks", "+  dot                        up      targets.py:"),
        (_flops, "flops", "whole                      20.5 kFLOP  none"),
    ],
)
def test_every_change_is_found_and_printed(
    change: Callable[[dict[str, Any]], None], key: str, line: str, plain: dict[str, Any]
) -> None:
    changed = copy.deepcopy(plain)
    change(changed)
    found = compared(plain, changed)
    assert set(json_of(found)) == {"version", key} and line in diff_text(found)


def test_a_change_of_any_table_is_found(plain: dict[str, Any]) -> None:
    for key in set(plain) - {"version", "stages", "notes"}:
        changed = copy.deepcopy(plain)
        value = changed[key]
        if isinstance(value, list):
            value[:] = value[1:] or [
                {**(plain["nodes"][8] if key == "fallbacks" else plain["inputs"][0]), "name": "more"}
            ]
        elif isinstance(value, dict):
            value[next(iter(value))] += 1
        else:
            changed[key] = "localized"
        assert not is_same(compared(plain, changed)), key


def test_parts_of_dumps_are_compared_in_what_both_have(plain: dict[str, Any]) -> None:
    part = {key: plain[key] for key in ("version", "level", "mesh", "collectives")} | {"only": "collectives"}
    found = compared(part, plain)
    assert is_same(found) and "memory" in (found.left_out or ())
    assert diff_text(found).startswith("no difference\n\none dump leaves out parameters, buffers")


def test_collectives_are_matched_once(plain: dict[str, Any]) -> None:
    doubled = {**plain, "collectives": plain["collectives"] * 2}
    pairs, went, came = matched(read(Dump, plain), read(Dump, doubled))
    assert len(pairs) == len(came) == len(plain["collectives"]) and not went


# The command.


def test_the_command_compares_files_and_ends_as_diff_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: dict[str, Any], golden: Callable[..., None]
) -> None:
    paths = [tmp_path / name for name in ("plain.json", "zero.json")]
    for path, record in zip(paths, (plain, dumped(zero=Zero("dp", 3))), strict=True):
        path.write_text(json.dumps(record))
    assert main(["diff", str(paths[0]), str(paths[0])]) == 0
    assert capsys.readouterr().out == "no difference\n"
    for format_, ending in (("text", "txt"), ("json", "json")):
        assert main(["diff", *map(str, paths), "--format", format_]) == 1
        golden(f"diff.{ending}", capsys.readouterr().out)


def test_the_command_compares_targets_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["dump", "targets:mlp", *ON_FOUR, "--format", "json", "-o", str(path)]) == 0
    assert main(["diff", "targets:mlp", str(path), *ON_FOUR]) == 0
    assert main(["diff", "targets:mlp", "targets:mlp", *ON_FOUR]) == 0
    assert capsys.readouterr().err.count("compiling") == 3
    passes = ["targets:mlp@lower_reshards", "targets:mlp@bucket_collectives"]
    assert main(["diff", *passes, *ON_FOUR]) == 1
    out = capsys.readouterr().out
    assert "\nbackward  all_reduce  dp    4 -> 1  1.1 kB      1.1 kB\n" in out and "parameter " not in out
    assert main(["diff", "targets:mlp@propagat", "targets:mlp", *ON_FOUR]) == 2
    assert "did you mean propagate?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory\n  it cannot be read\n  write one with shardc dump"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        (b"\xff{}", "it is no JSON"),
        ("[]", "a list\n  it is no dump of a program"),
        ("{}", "an object without keys\n  it is no dump of a program"),
        ("null", "null\n  it is no dump of a program"),
        ("3.5", "a number\n  it is no dump of a program"),
        (
            '{"version": 1, "level": "lowered", "mesh": {}}',
            "it has no 'collectives'\n  it is not as shardc dump --schema",
        ),
        (
            '{"version": 1, "level": "higher", "mesh": {}, "only": "memory"}',
            'level is "higher", none of captured, canonical',
        ),
        ('{"version": 1, "level": "lowered", "mesh": {"dp": "2"}, "only": "memory"}', 'mesh.dp is "2", no integer\n'),
        ('{"version": 1, "before": "capture"}', "keys version, before\n  it is no dump of a program"),
        (
            '{"version": 1, "level": "lowered", "mesh": [2], "only": "memory"}',
            "mesh is [2], no object\n  it is not as shardc dump --schema",
        ),
        (
            '{"version": 1, "level": "lowered", "mesh": {}, "only": "x", "collectives": [{}]}',
            "collectives[0] has no 'id'",
        ),
        ('{"version": 2, "level": "lowered", "mesh": {}}', "version 2\n  this shardc reads version 1"),
    ],
)
def test_a_file_that_is_no_dump_is_named(
    content: str | bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["diff", str(path), str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_target_without_a_mesh_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "targets:mlp", "targets:mlp"]) == 2
    assert "--mesh: targets:mlp\n  a target is compiled for a mesh" in capsys.readouterr().err
