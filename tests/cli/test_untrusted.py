"""What comes from a model, a file or a name can neither move a terminal's cursor, nor forge a line, nor block."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from shardc.cli.main import main

UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
NAME, MODULE = "w\x1b[31m\nforged  line\u202e", "m\x9b\r\u2066x"
ESCAPED = r"w\x1b[31m\nforged  line\u202e"
MODEL = f"""
import torch
from torch import nn
from shardc import P

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter({NAME!r}, nn.Parameter(torch.ones(8, 8)))
        self.add_module({MODULE!r}, nn.Linear(8, 8))

    def forward(self, x):
        return getattr(self, {MODULE!r})(x @ getattr(self, {NAME!r})).sum()

def target():
    return Model(), (torch.ones(4, 8),), {{}}, {{"x": P("dp"), {NAME.replace("[", "[[]")!r}: P(None, "tp")}}
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py:target"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["text", "dot", "json", "html"])
def test_names_are_escaped_in_every_format(target: str, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", target, "--mesh", "dp=2,tp=2", "--format", format]) == 0
    printed, said = capsys.readouterr()
    assert not UNPRINTABLE.search(printed) and not UNPRINTABLE.search(said)
    assert not re.search("^forged", printed, re.MULTILINE)
    if format == "text":
        assert f"  parameter {ESCAPED}: f32[8, 8@tp]\n" in printed


@pytest.mark.slow
def test_names_are_escaped_in_explanations_and_errors(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", target, NAME, "--mesh", "dp=2,tp=2"]) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith(f"parameter {ESCAPED}: f32[8, 8@tp]\n")
    assert not UNPRINTABLE.search(printed + said) and not re.search("^forged", printed + said, re.MULTILINE)
    assert main(["explain", target, f"{NAME}.x", "--mesh", "dp=2,tp=2"]) == 2
    assert not UNPRINTABLE.search(capsys.readouterr().err)


def test_names_of_a_dump_that_others_wrote_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((Path(__file__).parent.parent / "golden" / "mlp.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(record))
    record["parameters"][0]["name"] = NAME
    (tmp_path / "b.json").write_text(json.dumps(record))
    assert main(["diff", f"{tmp_path}/a.json", f"{tmp_path}/b.json"]) == 1
    printed, _ = capsys.readouterr()
    assert ESCAPED in printed and not UNPRINTABLE.search(printed)


@pytest.mark.parametrize(
    "arguments",
    [["diff", "pipe.json", "pipe.json"], ["dump", "pipe.py:target", "--mesh", "dp=2"],
     ["dump", "model.py:target", "--mesh", "dp=2", "--links", "pipe.json"],
     ["dump", "model.py:target", "--mesh", "dp=2", "--links", "/dev/zero"]],
)  # fmt: skip
def test_a_pipe_or_a_device_is_refused_as_a_file(
    arguments: list[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("pipe.json", "pipe.py"):
        os.mkfifo(name)
    assert main(arguments) == 2
    assert "is a pipe or a device, not a file" in capsys.readouterr().err
