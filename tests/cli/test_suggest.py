"""``shardc suggest``: what it prints, in three forms, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from schemas import errors

import shardc
from shardc.cli.main import main
from shardc.cli.targets.target import TargetOptions, load_target
from shardc.language.machine import Machine
from shardc.report.dump.schema import form_schema

SUPPORT = Path(__file__).parents[1] / "support"
COMMAND = ["suggest", "targets:mlp", "--devices", "4", "--device", "h100", "--links", "nvlink"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main([*COMMAND, *argv]) == code
    return capsys.readouterr().out


def test_json_is_as_its_schema_says_the_same_each_time_and_of_plans_as_compile_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (printed(capsys, "--format", "json", "--top", "2") for _ in range(2))
    assert first == second
    record = json.loads(first)
    assert errors(record, form_schema("suggest")) == []
    assert record["memory"] == 80 * 10**9 and record["devices"] == 4 and len(record["suggestions"]) == 2
    for found in record["suggestions"]:
        program = compiled_as(found)
        assert program.memory == found["memory"]
        assert program.timeline.makespan == found["seconds"]["step"]


def compiled_as(found: dict[str, Any]) -> shardc.Compiled:
    """The plan of a suggestion in JSON, by its Python."""
    target = load_target("targets:mlp", TargetOptions({}), shardc.Mesh(dp=4))
    given: dict[str, Any] = {}

    def parallelize(model: object, mesh: shardc.Mesh, annotations: dict[str, shardc.P], **options: Any) -> None:
        given.update(options, mesh=mesh, annotations=annotations)

    class Names:
        Mesh, P, Zero, Remat, Pipeline = shardc.Mesh, shardc.P, shardc.Zero, shardc.Remat, shardc.Pipeline

    names = Names()
    names.parallelize = parallelize  # type: ignore[attr-defined]
    exec(found["python"], {"shardc": names, "model": target.model})
    machine = Machine({"*": "nvlink"}, "h100")  # type: ignore[dict-item, arg-type]
    return shardc.compile(target.model, args=target.args, kwargs=target.kwargs, links=machine, **given)


def test_text_and_page_are_the_same_each_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fixed = ("--fix", "dp=4", "--fix", "zero=0", "--top", "1")
    texts = {printed(capsys, *fixed) for _ in range(2)}
    assert len(texts) == 1 and "dp=4" in texts.pop()
    path = tmp_path / "plans.html"
    assert printed(capsys, *fixed, "--format", "html", "-o", str(path)) == ""
    assert path.read_text().startswith("<!doctype html>")


def test_what_is_fixed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--fix", "tp=2", "--fix", "zero=none", "--fix", "pipeline=none")
    record = json.loads(printed(capsys, *fixed, "--format", "json"))
    assert all(each["mesh"]["tp"] == 2 and each["zero"] is None for each in record["suggestions"])


def test_an_annotation_that_is_given_stays(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--annotate", "up.weight=width", "--fix", "width=4")
    record = json.loads(printed(capsys, *given, "--format", "json"))
    assert all("up.weight" in each["annotations"] for each in record["suggestions"])
    assert all(each["mesh"]["width"] == 4 for each in record["suggestions"])


def test_hints_are_printed_as_json_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = [f"--fix={each}" for each in ("dp=4", "zero=0", "remat=none", "overlap=none", "saved=none")]
    slow = ("--links", "ethernet", "--annotate", "x=dp", "--top", "1", *fixed)
    (hint,) = json.loads(printed(capsys, *slow, "--format", "json"))["suggestions"][0]["hints"]
    assert hint.startswith(
        "local=Local('dp', every=20), with annotations {'target': P('dp', ...)} too: groups along dp"
    )
    assert f"faster, with other numbers {hint}" in " ".join(printed(capsys, *slow).split())


def test_where_nothing_fits_the_nearest_plan_is_printed_and_by_how_much_it_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--memory", "1kB", code=1)
    assert "No plan fits: the nearest needs " in text and "too much" in text.splitlines()[1]


def test_a_file_of_measured_links_is_a_device_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = Machine({"*": "ethernet"}, "l40s")  # type: ignore[dict-item, arg-type]
    path = tmp_path / "links.json"
    path.write_text(json.dumps(machine.to_json()))
    command = ["suggest", "targets:mlp", "--devices", "2", "--links", str(path), "--format", "json", "--top", "1"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["links"]["*"]["name"] == "ethernet" and record["memory"] == 48 * 10**9


def test_batch_also_sets_that_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (json.loads(printed(capsys, "--batch", size, "--format", "json")) for size in ("8", "64"))
    assert small["suggestions"][0]["flops"] < large["suggestions"][0]["flops"]


def test_ctrl_c_prints_the_best_plans_so_far() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); from shardc.cli.main import main; sys.exit(main({COMMAND}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if "on meshes" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (said, err)
    assert "so far" in err and out.startswith("rank") and "shardc.parallelize(" in out
