"""The code in every README and guide: each python and console block runs, and prints what stands below it.

A ``text`` block after a ``python`` block is what that prints. The python blocks of a README share one namespace, in
order. In a ``console`` block ``$ `` begins a command, and the lines below it are its stdout; ``...`` stands
for any text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.cli.main import main
from shardc.language.rule import RULES
from shardc.passes.order import PASSES

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of code, the line of the README that it begins on, and what it prints, or None where nothing is said."""

    line: int
    code: str
    output: str | None


def blocks(text: str) -> list[tuple[int, str, str]]:
    """Line, language and body of every fenced block."""
    return [(text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in FENCE.finditer(text)]


def python_snippets(text: str) -> Iterator[Snippet]:
    """The python blocks, each with the text block that follows it."""
    found = blocks(text)
    for (line, language, body), following in zip(found, [*found, (0, "", "")][1:], strict=True):
        if language == "python":
            yield Snippet(line, body, following[2] if following[1] == "text" else None)


def console_snippets(text: str) -> Iterator[Snippet]:
    """The commands of the console blocks, each with the lines below it."""
    for line, language, body in blocks(text):
        if language != "console":
            continue
        assert body.startswith("$ "), f"line {line}: a console block begins with a command"
        for part in re.split(r"^(?=\$ )", body, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Snippet(line, command.removeprefix("$ "), output or None)


def prints(expected: str, actual: str) -> bool:
    """Whether the output is the expected one, where ``...`` stands for anything; blank ends do not count."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, actual.strip(), re.DOTALL) is not None


RUNTIME = ("runtime", "runtime/checkpoint", "runtime/huggingface")
FOLDERS = ("benchmarks", "passes", *RUNTIME, "shardc/capture", "shardc/cli", "tests")
GUIDES = tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", *(f"{folder}/README.md" for folder in FOLDERS), *GUIDES)
READMES = {page: (ROOT / page).read_text() for page in PAGES if (ROOT / page).exists()}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in READMES.items() if list(python_snippets(text))])
def test_python_blocks_run_in_order_and_print_what_stands_below(page: str) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    rules = dict(RULES)
    for snippet in python_snippets(READMES[page]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet.code, "example.py", "exec"), namespace)
        is_as_said = snippet.output is None or prints(snippet.output, printed.getvalue())
        assert is_as_said, f"{page} line {snippet.line} printed\n{printed.getvalue()}"
    for op in RULES.keys() - rules.keys():
        del RULES[op]  # the page's own op


def commands() -> list[Any]:
    """The console blocks as parameters; long ones and jobs of several processes, one after another, are a sweep."""
    job = [pytest.mark.sweep, pytest.mark.xdist_group("gloo")]
    marks = {"torchrun": job, "--symbolic": [pytest.mark.sweep], "hf_gpt2.py": [pytest.mark.sweep]}
    return [
        pytest.param(
            page,
            each,
            id=f"{page}: {each.code[:60]}",
            marks=next((found for word, found in marks.items() if word in each.code), []),
        )
        for page, text in READMES.items()
        for each in console_snippets(text)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "snippet"), commands())
def test_a_console_block_runs_and_prints_what_stands_below(
    page: str, snippet: Snippet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    printed = "".join(ran(part, capsys) for part in snippet.code.split(" && "))
    is_as_said = snippet.output is None or prints(snippet.output, printed)
    assert is_as_said, f"{page} line {snippet.line} printed\n{printed}"


def ran(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints; ``shardc``, which others run as it is installed, runs here, where torch is there."""
    first, pipe, rest = command.partition(" | ")
    words = shlex.split(first)
    if words[0] != "shardc" or set("|<>;$&*") & set(re.sub(r"'[^']*'", "", first)):
        return typed(command)
    code, printed = main(words[1:]), capsys.readouterr()
    assert code == 0 or pipe, printed
    return typed(rest, printed.out) if pipe else printed.out


def typed(command: str, given: str = "") -> str:
    """What a shell's command prints that is given some text."""
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    """The tests' own, with the installed commands first on the path, and one thread."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_the_table_of_passes_names_every_pass_in_order() -> None:
    named = re.findall(r"^\|[^|]*\| `(\w+)` \|", READMES["passes/README.md"], re.MULTILINE)
    assert named == [run.__name__ for run in PASSES]


def test_the_readme_fits_on_three_screens() -> None:
    assert READMES["README.md"].count("\n") <= 230


def test_every_link_between_pages_leads_somewhere() -> None:
    for page, text in READMES.items():
        for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), f"{page}: {target}"
            assert not heading or heading in headings(path.read_text()), f"{page}: {target}#{heading}"


def test_the_reference_has_every_public_name_once() -> None:
    assert sorted(re.findall(r"^::: shardc\.(\w+)$", READMES["docs/api.md"], re.MULTILINE)) == sorted(shardc.__all__)


def headings(text: str) -> list[str]:
    """The names by which links know the headings of a page."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in found]


def test_a_wrong_output_is_caught() -> None:
    assert prints("loss 1...\nend\n", "loss 1.25\nmore\nend")
    assert not prints("loss 1.25\n", "loss 1.26\n")
    assert not prints("one\n", "one\ntwo\n")


def test_every_kind_of_block_is_found() -> None:
    text = "```python\nprint(1)\n```\nprints\n```text\n1\n```\n"
    text += "```console\n$ echo a\na\n$ true\n```\n```sh\nmake demo\n```\n"
    assert list(python_snippets(text)) == [Snippet(2, "print(1)\n", "1\n")]
    assert list(console_snippets(text)) == [Snippet(9, "echo a", "a\n"), Snippet(9, "true", None)]
    first = READMES["README.md"]
    assert list(python_snippets(first)) and list(console_snippets(first))
