"""An invalid command line is refused with the argument, what does not fit, and what to type instead."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardc
from shardc.cli import dump
from shardc.cli.main import main

DIR = str(Path(__file__).parents[1] / "support")
SUGGEST = ["suggest", "DIR/targets.py:bare", "--devices", "4"]
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
        "  it does not read as axes and a stage\n"
        "  write --zero dp=3, or --zero dp+node=3,gather_over=node",
    ),
    "zero over no axis": (
        [*DUMP, "--zero", "dq"], 2,
        "shardc: Zero('dq'): the mesh is Mesh(dp=2, tp=2)\n"
        "  it has no such axis\n"
        "  did you mean dp?",
    ),
    "no axis of the pipeline": (
        [*DUMP, "--pipeline", "pp"], 2,
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
        [*DUMP, "--remat", "upp"], 2,
        "shardc: Remat(blocks='upp'): a glob over 2 modules\n"
        "  it matches none that makes a value\n"
        "  did you mean up?",
    ),
    "remat of bytes in words": (
        [*DUMP, "--remat", "8GB"], 2,
        "shardc dump: argument --remat: '8GB'\n"
        "  it is no glob over modules, and no number of bytes\n"
        "  write 'h.*', or digits alone",
    ),
    "a cut nowhere": (
        ["stages", "DIR/targets.py:bare", "--stages", "2", "--cut", ""], 2,
        "shardc stages: argument --cut: ''\n"
        "  it names nothing\n"
        "  say a name, or leave the option out",
    ),
    "a model that ends the process": (
        ["dump", "DIR/targets.py:ending", "--mesh", "dp=2"], 3,
        "shardc: targets.py:...: raise SystemExit(5)\n"
        "  it ends the process\n"
        "  raise an error there, or leave it out",
    ),
    "a model that raises and says nothing": (
        ["dump", "DIR/targets.py:silent", "--mesh", "dp=2"], 3,
        "shardc: targets.py:...: raise LookupError\n"
        "  LookupError\n"
        "  run the model eagerly on these inputs, and mend it",
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
        "  did you mean targets.py or ...?",
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
    "options of compiling for a dump": (
        ["check", "plan.json", "--fail-on", "note", "--mesh", "dp=2", "--annotate", "x=dp", "--no-train"], 2,
        "shardc: --no-train, --mesh, --annotate: with plan.json\n"
        "  a dump is of a plan that is compiled already, for its own mesh and options\n"
        "  leave them out, or name the TARGET, path.py:function, not its dump",
    ),
    "a mesh for two dumps": (
        ["diff", "a.json", "b.json", "--mesh", "dp=2"], 2,
        "shardc: --mesh: with a.json and b.json\n"
        "  a dump is of a plan that is compiled already, for its own mesh and options\n"
        "  leave it out, or name the TARGET, path.py:function, not its dump",
    ),
    "compiling anew at no point": (
        ["cost", "DIR/targets.py:bare", "--mesh", "dp=2", "--symbolic", "--recompile"], 2,
        "shardc: --recompile: without --at\n"
        "  there is no point at which to compile anew\n"
        "  say --at dp=64 too, where to compile, or leave --recompile out",
    ),
    "a point with a symbol twice": (
        ["cost", "DIR/targets.py:bare", "--mesh", "dp=2", "--at", "dp=2,dp=4"], 2,
        "shardc cost: argument --at: 'dp=2,dp=4'\n"
        "  it has a symbol twice\n"
        "  write each symbol once, as in --at dp=64,tp=8,B=512",
    ),
    "only nothing": (
        [*DUMP, "--only", ""], 2,
        "shardc dump: argument --only: ''\n"
        "  it names nothing\n"
        "  say a name, or leave the option out",
    ),
    "only what is not there": (
        [*DUMP, "--only", "colectives"], 2,
        "shardc: --only 'colectives': a table (...), or a glob over ... names of values and modules\n"
        "  it is no table, and finds no value and no module\n"
        "  did you mean collectives or notes?",
    ),
    "after no pass and a difference": (
        [*DUMP, "--after", "propagate", "--diff", "propagate"], 2,
        "shardc dump: argument --diff: not allowed with argument --after\n"
        "  leave one of them out",
    ),
    "a difference of three passes": (
        [*DUMP, "--diff", "capture,propagate,localize"], 2,
        "shardc: --diff 'capture,propagate,localize': 3 passes\n"
        "  a difference is between two\n"
        "  say --diff capture,localize",
    ),
    "a difference of no pass": (
        [*DUMP, "--diff", "capture,propagat"], 2,
        "shardc: --diff 'propagat': the passes are capture, ...\n"
        "  there is no such pass\n"
        "  did you mean propagate?",
    ),
    "seconds of a drawing": (
        [*DUMP, "-v", "--format", "dot"], 2,
        "shardc: -v: with --format\n"
        "  the seconds of each pass are for a whole dump, as text or JSON\n"
        "  leave -v or --format out",
    ),
    "a link that is not known": (
        [*DUMP, "--links", "tp=nvlnk"], 2,
        "shardc: links['tp']: 'nvlnk'\n"
        "  there is no such link\n"
        "  did you mean nvlink or nvlink5 or nvlink4?",
    ),
    "a link of suggest that is not known": (
        [*SUGGEST, "--links", "nvlink,infinband", "--nodes", "2"], 2,
        "shardc: links: 'infinband'\n"
        "  there is no such link\n"
        "  did you mean infiniband?",
    ),
    "a device of suggest that is not known": (
        [*SUGGEST, "--device", "h20"], 2,
        "shardc: device: 'h20'\n"
        "  there is no such device\n"
        "  did you mean h200 or h100 or b200?",
    ),
    "nodes that do not divide the devices": (
        [*SUGGEST, "--links", "nvlink,ib", "--nodes", "3"], 2,
        "shardc: nodes=3: 4 devices\n"
        "  nodes have equal numbers of devices\n"
        "  say a number of nodes that divides 4",
    ),
    "nodes that no link joins": (
        [*SUGGEST, "--links", "nvlink", "--nodes", "2"], 2,
        "shardc: links: 'nvlink', of 2 nodes\n"
        "  no link joins the nodes\n"
        "  say a second one, as in nvlink,infiniband; presets: ...",
    ),
    "a link between nodes where there is one": (
        [*SUGGEST, "--links", "nvlink,infiniband"], 2,
        "shardc: links: 'nvlink,infiniband', of 1 node\n"
        "  one node has no link to another\n"
        "  say 2 nodes, or one link alone",
    ),
    "a file of links that is not there": (
        [*SUGGEST, "--links", "DIR/none.json"], 2,
        "shardc: links: 'DIR/none.json'\n"
        "  No such file or directory\n"
        "  run shardc bench-links ...",
    ),
    "an axis to fix that no plan has": (
        [*SUGGEST, "--fix", "tq=4"], 2,
        "shardc: fix={'tq': ...}: 'tq'\n"
        "  a plan has no such part\n"
        "  did you mean tp?",
    ),
    "a stage of zero to fix": (
        [*SUGGEST, "--fix", "zero=4"], 2,
        "shardc suggest: argument --fix: '4'\n"
        "  there is no such stage of ZeRO\n"
        "  write --fix zero=3, or a stage from 0 to 3",
    ),
    "nothing to fix": (
        [*SUGGEST, "--fix", "tp"], 2,
        "shardc suggest: argument --fix: 'tp'\n"
        "  tp has no value\n"
        "  write --fix tp=4",
    ),
    "a precision to fix": (
        [*SUGGEST, "--fix", "precision=bf61"], 2,
        "shardc suggest: argument --fix: 'bf61'\n"
        "  it is none of bf16, fp16, fp32\n"
        "  did you mean bf16 or fp16?",
    ),
    "an overlap to fix": (
        [*SUGGEST, "--fix", "overlap=rings"], 2,
        "shardc suggest: argument --fix: 'rings'\n"
        "  it is none of auto, ring\n"
        "  did you mean ring?",
    ),
    "a size that does not divide the devices": (
        [*SUGGEST, "--fix", "tp=3"], 2,
        "shardc: fix={'tp': ...}: 3\n"
        "  a plan cannot have it\n"
        "  say a size that divides 4 devices",
    ),
    "memory that is no number": (
        [*SUGGEST, "--memory", "80 hectares"], 2,
        "shardc suggest: argument --memory: '80 hectares'\n"
        "  it is no number of bytes\n"
        "  say 80GB, or digits alone",
    ),
    "an objective that is not known": (
        [*SUGGEST, "--objective", "tim"], 2,
        "shardc suggest: argument --objective: 'tim'\n"
        "  it is none of time, memory\n"
        "  did you mean time?",
    ),
    "a folder for suggestions that is not there": (
        [*SUGGEST, "--links", "nvlink", "-o", "DIR/none/plans.html"], 2,
        "shardc: -o DIR/none/plans.html: No such file or directory\n"
        "  it cannot be written\n"
        "  name a file in a folder that exists and may be written",
    ),
    "a link of no axis": (
        [*DUMP, "--links", "pp=nvlink"], 2,
        "shardc: links['pp']: Mesh(dp=2, tp=2)\n"
        "  the mesh has no such axis\n"
        "  did you mean tp or dp?",
    ),
    "an axis with two links": (
        [*DUMP, "--links", "tp=nvlink,tp=ib"], 2,
        "shardc: links: 'tp=nvlink,tp=ib'\n"
        "  it names 'tp' twice\n"
        "  say one link for each axis",
    ),
    "a file of links that is none": (
        [*DUMP, "--links", "DIR/targets.py"], 2,
        "shardc: links: 'DIR/targets.py'\n"
        "  it is no file of shardc bench-links, version 1\n"
        "  run shardc bench-links -o FILE, or say nvlink",
    ),
    "a device that is not known": (
        [*DUMP, "--device", "h1000"], 2,
        "shardc: device: 'h1000'\n"
        "  there is no such device\n"
        "  did you mean h100 or h200 or a100?",
    ),
    "more ranks than anyone has": (
        ["dump", "DIR/targets.py:bare", "--mesh", "dp=2,tp=1000000000"], 2,
        "shardc dump: argument --mesh: 'dp=2,tp=1000000000': 2000000000 ranks\n"
        "  a mesh has at most 1048576 ranks\n"
        "  say sizes whose product is at most 1048576",
    ),
    "a size in letters of another kind": (
        ["dump", "DIR/targets.py:bare", "--mesh", "dp=²"], 2,
        "shardc dump: argument --mesh: 'dp=²'\n"
        "  it does not read as axes and their sizes\n"
        "  write --mesh dp=2,tp=4",
    ),
    "a setting of a pipeline twice": (
        [*DUMP, "--pipeline", "dp,microbatches=2,microbatches=4"], 2,
        "shardc dump: argument --pipeline: 'dp,microbatches=2,microbatches=4'\n"
        "  it says microbatches twice\n"
        "  say each setting once",
    ),
    "microbatches without end": (
        [*DUMP, "--pipeline", "dp,microbatches=1000000000"], 2,
        "shardc dump: argument --pipeline: 'dp,microbatches=1000000000': microbatches=1000000000\n"
        "  it counts pieces of a batch\n"
        "  say 1024 or less",
    ),
    "no processes": (
        ["bench-links", "--ranks", "0"], 2,
        "shardc bench-links: argument --ranks: '0'\n"
        "  it is no whole number of 1 or more\n"
        "  write digits alone, as in 8",
    ),
    "a mesh and a number of processes": (
        ["bench-links", "--ranks", "4", "--mesh", "dp=2"], 2,
        "shardc bench-links: argument --mesh: not allowed with argument --ranks\n"
        "  leave one of them out",
    ),
    "more processes than processors": (
        ["bench-links", "--mesh", "dp=1000"], 2,
        "shardc: --mesh dp=1000: ... processors\n"
        "  ranks that share one wait for each other, and not for a link\n"
        "  say --ranks ..., or start it with torchrun on the ranks of a job",
    ),
    "a symbol of nothing": (
        ["cost", "DIR/targets.py:mlp", "--mesh", "dp=2,tp=2", "--set", "dropout=1", "--symbol", "B=nothing"], 2,
        "shardc: --symbol B=nothing: 'nothing'\n"
        "  it is no dim of an input, no list of modules and no setting\n"
        "  name one of x.0, x.1, target.0, target.1, dropout",
    ),
    "a module's name that is none": (
        ["dump", "..:f", "--mesh", "dp=2"], 2,
        "shardc: TARGET '..': importing it raised TypeError\n"
        "  ...\n"
        "  write path.py:function, package.module:function or hf:MODEL_TYPE",
    ),
    "a module that is not there, of a package that is": (
        ["dump", "shardc.passes.nowhere.at.all:f", "--mesh", "dp=2"], 2,
        "shardc: TARGET shardc.passes.nowhere.at.all: a module\n"
        "  there is no such module\n"
        "  write path.py:function, package.module:function or hf:MODEL_TYPE",
    ),
    "a model whose making raises": (
        ["dump", "DIR/targets.py:unmade", "--mesh", "dp=2"], 2,
        "shardc: TARGET 'DIR/targets.py:unmade': unmade() raised ValueError\n"
        "  no such size\n"
        "  mend targets.py:..., and run the file with python to see more",
    ),
    "inputs that the model does not take": (
        ["dump", "DIR/targets.py:overfed", "--mesh", "dp=2"], 2,
        "shardc: TARGET 'DIR/targets.py:overfed': the inputs: forward takes (x: torch.Tensor) -> torch.Tensor\n"
        "  too many positional arguments\n"
        "  give what forward takes: ...",
    ),
    "an input of another shape, deep in the model": (
        ["dump", "DIR/targets.py:misfit", "--mesh", "dp=2"], 3,
        "shardc: targets.py:...: return self.up(x), in body.1.up (Linear)\n"
        "  RuntimeError: ...\n"
        "  run the model eagerly on these inputs; if that works, write this line with other ops of torch",
    ),
    "an annotation of a part of an axis": (
        [*DUMP, "--annotate", "x=(3)tp"], 4,
        "shardc: --annotate 'x=(3)tp': entry '(3)tp'\n"
        "  it is no name of an axis, nor - or ?\n"
        "  write tp, tp:(2)2 for the minor 2 of its 4 ranks, or blocks(3,tp) for each of 3 blocks; a SPEC reads ...",
    ),
    "an annotation as Python has it": (
        [*DUMP, "--annotate", "x=P('dp', None)"], 4,
        "shardc: --annotate \"x=P('dp', None)\": entry \"P('dp', None)\"\n"
        "  it is no name of an axis, nor - or ?\n"
        "  write dp,- for 2 dims; a SPEC reads ...",
    ),
    "two annotations of one pattern": (
        [*DUMP, "--annotate", "x=dp", "--annotate", "x=tp"], 4,
        "shardc: --annotate 'x=tp': tp, and dp\n"
        "  two annotations of x say different things\n"
        "  leave one of them out",
    ),
    "an annotation of nothing": (
        [*DUMP, "--annotate", "=dp"], 4,
        "shardc: --annotate '=dp': no pattern\n"
        "  an annotation reads PATTERN=SPEC\n"
        "  write --annotate 'x=dp'",
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
def test_an_invalid_command_line_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, code, expected = MISTAKES[name]
    found = said(capsys, argv)
    assert found[0] == code
    assert re.fullmatch(".*".join(map(re.escape, expected.split("..."))), found[1], re.DOTALL), found[1]


def test_a_file_that_python_cannot_read_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, expected in (
        (
            "mistake",
            "import os\n\ndef f(:\n    pass\n",
            "importing it raised SyntaxError\n  ...\n  mend mistake.py:3, and",
        ),
        ("indent", "def f():\nreturn 1\n", "importing it raised IndentationError\n  ...\n  mend indent.py:2, and"),
        ("letters", b"x = '\xff'\n", "importing it raised SyntaxError\n  ...\n  mend letters.py:1, and"),
        (
            "absent",
            "import no_such_module\n",
            "ModuleNotFoundError\n  No module named 'no_such_module'\n  mend absent.py:1, and",
        ),
        ("wrong", "import torch\nx = torch.zeros(2) @ torch.zeros(3)\n", "RuntimeError\n  ...\n  mend wrong.py:2, and"),
        ("nulls", b"\x00", "source code string cannot contain null bytes\n  mend nulls.py, and"),
        ("ended", "import sys\nsys.exit(3)\n", "SystemExit\n  3\n  mend ended.py:2, and"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        code, text = said(capsys, ["dump", f"{path}:f", "--mesh", "dp=2"])
        assert code == 2 and re.search(".*".join(map(re.escape, expected.split("..."))), text, re.DOTALL), text


def test_output_of_the_target_does_not_mix_with_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{DIR}/targets.py:loud", "--mesh", "dp=2,tp=2", "--only", "memory", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["only"] == "memory" and "making the model" in err


def test_an_interrupted_command_says_so_and_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dump, "compiled", stopped)
    assert main([*(each.replace("DIR", DIR) for each in DUMP)]) == 130
    assert capsys.readouterr().err == "shardc: interrupted\n"


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("shardc --help | true", 0, ""),
        ("shardc dump --schema | head -n 1", 0, "{\n"),
        ("shardc diff a.json a.json > /dev/full", 2, "shardc: stdout: No space left on device\n"),
        ("shardc diff a.json a.json >&-", 2, "shardc: stdout: it is closed\n"),
        ("cd / && shardc diff $OLDPWD/a.json $OLDPWD/a.json", 0, "no difference\n"),
    ],
)
def test_a_closed_or_full_output_ends_the_command(command: str, code: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"version": 1, "level": "lowered", "mesh": {"dp": 2}, "only": "memory"}')
    typed = "set -o pipefail; " + command.replace("shardc", f"{sys.executable} -m shardc", 1)
    environment = {**os.environ, "PYTHONPATH": str(Path(shardc.__file__).parents[1])}
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == code and (done.stdout + done.stderr).startswith(text), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
