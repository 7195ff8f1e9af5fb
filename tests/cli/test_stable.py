"""Every command answers ``--help`` at once and without torch, and prints the same bytes in every process."""

import os
import resource
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from shardc.cli.main import COMMANDS

HERE = Path(__file__).parents[1] / "support"
HEAVY = {"networkx", "numpy", "sympy", "torch", "transformers"}
ALONE = f"""
import sys
from shardc.cli.main import main
try:
    main(sys.argv[1:])
finally:
    assert not {HEAVY!r} & sys.modules.keys(), {HEAVY!r} & sys.modules.keys()
"""
STARTS = 10  # of an interpreter that does nothing, 0.02 s each; a command takes 5 to 6, and torch alone 60
MEASURED = {"bench-links"}  # prints what it measures, which is never the same
MLP = ["targets:mlp", "--mesh", "dp=2,tp=2"]
PIPED = ["targets:for_mesh", "--mesh", "dp=2,pp=2", "--set", "dropout=0.5", "--pipeline", "pp,microbatches=2"]
WEIGHED = ["targets:weighed", "--mesh", "dp=2,tp=2", "--zero", "dp=3", "--links", "tp=nvlink"]
FORMATS = ("text", "json", "dot", "html")
COMMAND_LINES = [
    *(["dump", *PIPED, "--format", format_] for format_ in FORMATS),
    *(["dump", *WEIGHED, "--format", format_] for format_ in FORMATS),
    *(["dump", *MLP, "--after", name, "--format", "json"] for name in ("capture", "propagate", "localize")),
    *(["dump", *PIPED, "--diff", "propagate,lower_reshards", "--format", format_] for format_ in ("text", "json")),
    ["dump", *WEIGHED, "--only", "time,fallbacks,notes,*layer*"],
    ["diff", *MLP[1:], "targets:mlp@propagate", "targets:mlp"],
    ["diff", *MLP[1:], "targets:mlp@propagate", "targets:mlp", "--format", "json"],
    ["check", *WEIGHED, "--fail-on", "fallback", "--fail-on", "collectives>1", "--max-memory", "1GB"],
    ["check", *WEIGHED, "--fail-on", "fallback", "--format", "json"],
    ["stages", "targets:mlp", "--stages", "2", "--format", "json"],
    ["stages", "targets:mlp", "--stages", "2"],
    ["explain", *MLP, "down.weight"],
    ["trace", *MLP],
    ["cost", *MLP, "--format", "json"],
    ["cost", *MLP, "--symbolic"],
    ["verify", *MLP],
    *(["suggest", "targets:mlp", "--devices", "4", "--format", format_] for format_ in ("text", "json", "html")),
]
RUN_ALL = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}]
from shardc.cli.main import main
for line in {COMMAND_LINES!r}:
    print("$", *line, flush=True)
    print("exit", main(line), flush=True)
"""


def ran(code: str, *argv: str, seed: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it as users do: with modules that are compiled once (``PYTHONDONTWRITEBYTECODE`` would double the time)."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environment)


def processor_seconds(code: str, *argv: str) -> tuple[float, str]:
    """Of a process, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = ran(code, *argv)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def ran_at_once(*argv: str) -> str:
    """What a command prints, with nothing heavy imported and for little more than the interpreter takes to start.

    In one of five runs, each beside a bare one: how fast a processor is changes with what else it does.
    """
    found: list[float] = []
    while not found or (min(found) >= STARTS and len(found) < 5):
        (bare, _), (seconds, printed) = processor_seconds("pass"), processor_seconds(ALONE, *argv)
        found.append(seconds / bare)
    assert min(found) < STARTS, f"as long as {found} starts of an interpreter"
    return printed


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_answers_at_once_without_torch(command: str) -> None:
    printed = ran_at_once(*filter(None, [command]), "--help")
    assert printed.startswith("usage: ") and "exit codes: 0 good" in printed


def test_dumps_are_compared_and_checked_at_once_without_torch() -> None:
    golden = str(HERE.parent / "golden" / "mlp.json")
    ran_at_once("diff", golden, golden)
    ran_at_once("check", golden, "--fail-on", "all_gather", "--max-memory", "8GB")


def test_every_command_is_held_to_the_same_bytes() -> None:
    assert {line[0] for line in COMMAND_LINES} | MEASURED == set(COMMANDS)


@pytest.mark.sweep
def test_two_processes_print_the_same_bytes() -> None:
    """With another order of sets and dicts by hash in each."""
    first, second = (ran(RUN_ALL, seed=seed) for seed in (1, 2))
    assert first.returncode == second.returncode == 0, first.stderr
    lines = zip_longest(first.stdout.splitlines(), second.stdout.splitlines())
    assert [pair for pair in lines if pair[0] != pair[1]] == []
    exits = [line for line in first.stdout.splitlines() if line.startswith("exit ")]
    assert len(exits) == len(COMMAND_LINES) and {*exits} == {"exit 0", "exit 1"}
    assert str(HERE) not in first.stdout and "0x7" not in first.stdout
