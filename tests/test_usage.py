"""A command line that cannot be followed says which argument, what does not fit, and what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardc.cli import main

DIR = str(Path(__file__).parent)
DUMP = ["dump", "DIR/targets.py:bare", "--mesh", "dp=2,tp=2"]
PROGRESS = re.compile(r"^shardc: (loading|compiling|cutting).*\n", re.MULTILINE)


def said(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[object, str]:
    """The exit code, and what is said on stderr beside progress; nothing may be on stdout."""
    try:
        code: object = main([argument.replace("DIR", DIR) for argument in argv])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    out, err = capsys.readouterr()
    assert out == ""
    return code, PROGRESS.sub("", err).replace(DIR, "DIR").rstrip("\n")


MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "no such command": (
        ["dmp"], 2,
        "shardc: argument COMMAND: 'dmp'\n"
        "  it is none of dump, ...\n"
        "  did you mean dump?",
    ),
    "no command": (
        [], 2,
        "shardc: the following arguments are required: COMMAND\n"
        "  give COMMAND: dump, ...",
    ),
    "no target and no mesh": (
        ["dump"], 2,
        "shardc dump: the following arguments are required: TARGET, --mesh\n"
        "  give TARGET: a model: path.py:function, package.module:function, hf:gpt2\n"
        "  give --mesh: axes and sizes: dp=2,tp=4",
    ),
    "an option that is not known": (
        [*DUMP, "--strct"], 2,
        "shardc dump: argument --strct: unknown\n"
        "  shardc dump has no such argument\n"
        "  did you mean --strict or --set or --remat?",
    ),
    "an option that no one knows": (
        ["stages", "DIR/targets.py:bare", "--stages", "2", "--qqq"], 2,
        "shardc stages: argument --qqq: unknown\n"
        "  shardc stages has no such argument\n"
        "  did you mean --seq?",
    ),
    "a format that is not known": (
        [*DUMP, "--format", "jsn"], 2,
        "shardc dump: argument --format: 'jsn'\n"
        "  it is none of text, json, dot...\n"
        "  did you mean json?",
    ),
    "a pass that is not known": (
        [*DUMP, "--after", "propagat"], 2,
        "shardc: --after 'propagat': the passes are capture, ...\n"
        "  there is no such pass\n"
        "  did you mean propagate?",
    ),
    "a precision that is not known": (
        [*DUMP, "--precision", "bf61"], 2,
        "shardc dump: argument --precision: 'bf61'\n"
        "  it is none of bf16, fp16, fp32\n"
        "  did you mean bf16 or fp16?",
    ),
    "a mesh without sizes": (
        ["dump", "DIR/targets.py:bare", "--mesh", "dp"], 2,
        "shardc dump: argument --mesh: 'dp'\n"
        "  it does not read as axes and their sizes\n"
        "  write --mesh dp=2,tp=4",
    ),
    "an axis of no ranks": (
        ["dump", "DIR/targets.py:bare", "--mesh", "dp=0"], 2,
        "shardc dump: argument --mesh: 'dp=0'\n"
        "  an axis has at least one rank\n"
        "  write --mesh dp=2,tp=4",
    ),
    "an axis twice": (
        ["dump", "DIR/targets.py:bare", "--mesh", "dp=2,dp=2"], 2,
        "shardc dump: argument --mesh: 'dp=2,dp=2'\n"
        "  it has an axis twice\n"
        "  write each axis once, as in --mesh dp=2,tp=4",
    ),
    "no stage of zero": (
        [*DUMP, "--zero", "dp=4"], 2,
        "shardc dump: argument --zero: 'dp=4': stage=4\n"
        "  there is no such stage\n"
        "  say 1, 2 or 3",
    ),
    "zero without a number": (
        [*DUMP, "--zero", "dp=x"], 2,
        "shardc dump: argument --zero: 'dp=x'\n"
        "  it does not read as an axis and a stage\n"
        "  write --zero dp=3",
    ),
    "zero over no axis": (
        [*DUMP, "--zero", "dq"], 4,
        "shardc: Zero('dq'): the mesh is Mesh(dp=2, tp=2)\n"
        "  it has no such axis\n"
        "  did you mean dp?",
    ),
    "no axis of the pipeline": (
        [*DUMP, "--pipeline", "pp"], 4,
        "shardc: Pipeline('pp'): the mesh is Mesh(dp=2, tp=2)\n"
        "  it has no such axis\n"
        "  did you mean tp or dp?",
    ),
    "no setting of a pipeline": (
        [*DUMP, "--pipeline", "dp,microbatch=2"], 2,
        "shardc dump: argument --pipeline: 'dp,microbatch=2': 'microbatch'\n"
        "  a pipeline has no such setting\n"
        "  did you mean microbatches?",
    ),
    "a setting without a value": (
        [*DUMP, "--pipeline", "dp,microbatches"], 2,
        "shardc dump: argument --pipeline: 'dp,microbatches'\n"
        "  microbatches has no value\n"
        "  write microbatches=8",
    ),
    "no schedule": (
        [*DUMP, "--pipeline", "dp,schedule=1f2b"], 2,
        "shardc dump: argument --pipeline: 'dp,schedule=1f2b': schedule='1f2b'\n"
        "  there is no such schedule\n"
        "  did you mean 1f1b?",
    ),
    "remat of nothing": (
        [*DUMP, "--remat", "upp"], 4,
        "shardc: Remat(blocks='upp'): a glob over 2 modules\n"
        "  it matches none that makes a value\n"
        "  did you mean up?",
    ),
    "bytes that are none": (
        [*DUMP, "--bucket", "25MB"], 2,
        "shardc dump: argument --bucket: '25MB'\n"
        "  it is no whole number of 1 or more\n"
        "  write digits alone, as in 8",
    ),
    "a setting that is none": (
        [*DUMP, "--set", "n"], 2,
        "shardc dump: argument --set: 'n'\n"
        "  it has no '='\n"
        "  write --set n=2",
    ),
    "a setting that the function does not take": (
        [*DUMP, "--set", "dropot=2"], 2,
        "shardc: TARGET 'DIR/targets.py:bare': the function takes () -> tuple[typing.Any, ...]\n"
        "  got an unexpected keyword argument 'dropot'\n"
        "  leave --set dropot= out",
    ),
    "a file that is not there": (
        ["dump", "DIR/targts.py:bare", "--mesh", "dp=2"], 2,
        "shardc: TARGET DIR/targts.py: a file\n"
        "  there is no such file\n"
        "  did you mean targets.py or test_guards.py or test_imports.py?",
    ),
    "a file without .py": (
        ["dump", "DIR/targets:bare", "--mesh", "dp=2"], 2,
        "shardc: TARGET DIR/targets: a module\n"
        "  there is no such module\n"
        "  did you mean DIR/targets.py?",
    ),
    "a module that is not there": (
        ["dump", "no.such:f", "--mesh", "dp=2"], 2,
        "shardc: TARGET no.such: a module\n"
        "  there is no such module\n"
        "  write path.py:function, package.module:function or hf:MODEL_TYPE",
    ),
    "a function that is not there": (
        ["dump", "DIR/targets.py:baer", "--mesh", "dp=2"], 2,
        "shardc: TARGET DIR/targets.py:baer: DIR/targets.py has no 'baer'\n"
        "  a target names a function\n"
        "  did you mean bare?",
    ),
    "no function": (
        ["dump", "DIR/targets.py", "--mesh", "dp=2"], 2,
        "shardc: TARGET 'DIR/targets.py': it has no function or model type\n"
        "  a target is a place and a name\n"
        "  write path.py:function, package.module:function or hf:MODEL_TYPE",
    ),
    "a function that raises": (
        ["dump", "DIR/targets.py:failing", "--mesh", "dp=2"], 2,
        "shardc: TARGET 'DIR/targets.py:failing': failing() raised RuntimeError\n"
        "  no such data\n"
        "  mend targets.py:..., and run the file with python to see more",
    ),
    "a function that returns no model": (
        ["dump", "DIR/targets.py:not_a_model", "--mesh", "dp=2"], 2,
        "shardc: TARGET 'DIR/targets.py:not_a_model': it returned a tuple of str, tuple\n"
        "  that is no model with its inputs\n"
        "  return (model, args[, kwargs[, annotations]]): an nn.Module, a tuple and two dicts",
    ),
    "a model that raises": (
        ["dump", "DIR/targets.py:demanding", "--mesh", "dp=2"], 3,
        "shardc: targets.py:...: raise KeyError(\"labels are missing\")\n"
        "  KeyError: 'labels are missing'\n"
        "  run the model eagerly on these inputs, and mend it",
    ),
    "an input that the model cannot take": (
        ["verify", "DIR/targets.py:looking", "--mesh", "dp=2"], 3,
        "...shardc: targets.py:..., forward/(model)/index\n"
        "  ...out of bounds...\n"
        "  run the model eagerly on these inputs, and mend it",
    ),
    "a file that cannot be written": (
        [*DUMP, "-o", "/no/such/folder/x"], 2,
        "shardc: -o /no/such/folder/x: No such file or directory\n"
        "  it cannot be written\n"
        "  name a file in a folder that exists and may be written",
    ),
    "a model type that is not known": (
        ["dump", "hf:gtp2", "--mesh", "dp=2"], 2,
        "shardc: TARGET hf:gtp2: a model type\n"
        "  transformers has no such model type\n"
        "  did you mean gpt2 or tipsv2 or tvp?",
    ),
    "a field that the config does not have": (
        ["dump", "hf:gpt2", "--mesh", "dp=2", "--set", "n_layr=1", "--set", "n_hed=2"], 2,
        "shardc: 2 problems:\n"
        "--set n_layr=: a field of GPT2Config\n"
        "  it has no such field\n"
        "  did you mean n_layer or num_hidden_layers or n_head?\n"
        "--set n_hed=: a field of GPT2Config\n"
        "  it has no such field\n"
        "  did you mean n_head or n_embd or n_layer?",
    ),
    "a value that the config refuses": (
        ["dump", "hf:gpt2", "--mesh", "dp=2", "--set", "n_layer=x"], 2,
        "shardc: TARGET hf:gpt2: transformers raised StrictDataclassField...\n"
        "  ... error for field 'n_layer': TypeError: Field 'n_layer' expected int, got str (value: 'x')\n"
        "  give values that fit each other, other than --set n_layer=x",
    ),
    "more tokens than positions": (
        ["dump", "hf:gpt2", "--mesh", "dp=2", "--set", "n_layer=1", "--seq", "3000"], 2,
        "shardc: --seq 3000: max_position_embeddings=1024\n"
        "  the model has no position for what is longer\n"
        "  say --seq 1024 or less",
    ),
    "a SPEC with quotes": (
        [*DUMP, "--annotate", "x='dp'"], 4,
        "shardc: --annotate \"x='dp'\": entry \"'dp'\"\n"
        "  it is no name of an axis, nor - or ?\n"
        "  write dp, without quotes or brackets; a SPEC reads dp,-,tp: an axis, - whole, ? open, dp+tp several axes",
    ),
    "a SPEC in Python": (
        [*DUMP, "--annotate", "x=P(None)"], 4,
        "shardc: --annotate 'x=P(None)': entry 'P(None)'\n"
        "  it is no name of an axis, nor - or ?\n"
        "  write - for a whole dim; a SPEC reads dp,-,tp: an axis, - whole, ? open, dp+tp several axes",
    ),
    "an empty entry": (
        [*DUMP, "--annotate", "x=dp,,tp"], 4,
        "shardc: --annotate 'x=dp,,tp': an empty entry\n"
        "  every dim needs an entry\n"
        "  write - for a whole dim; a SPEC reads dp,-,tp: an axis, - whole, ? open, dp+tp several axes",
    ),
    "no SPEC": (
        [*DUMP, "--annotate", "x"], 4,
        "shardc: --annotate 'x': no '='\n"
        "  an annotation reads PATTERN=SPEC\n"
        "  write --annotate 'x=dp'",
    ),
    "a pattern that matches nothing": (
        [*DUMP, "--annotate", "up.wieght=tp"], 4,
        "shardc: annotation 'up.wieght': a pattern over 9 names (param, input, module)\n"
        "  it matches nothing\n"
        "  did you mean up.weight or down.weight or up.bias?",
    ),
    "no stages": (
        ["stages", "DIR/targets.py:bare", "--stages", "0"], 2,
        "shardc stages: argument --stages: '0'\n"
        "  it is no whole number of 1 or more\n"
        "  write digits alone, as in 8",
    ),
    "stages of nothing known": (
        ["stages", "DIR/targets.py:bare", "--stages", "2", "--by", "parms"], 2,
        "shardc stages: argument --by: 'parms'\n"
        "  it is none of params, flops, time, memory\n"
        "  did you mean params?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_command_line_that_cannot_be_followed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, code, expected = MISTAKES[name]
    found = said(capsys, argv)
    assert found[0] == code
    assert re.fullmatch(".*".join(map(re.escape, expected.split("..."))), found[1], re.DOTALL), found[1]
