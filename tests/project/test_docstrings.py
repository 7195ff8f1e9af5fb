"""The public names say what they take, return and raise, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import pytest

import shardc

FUNCTIONS = [name for name in shardc.__all__ if inspect.isfunction(getattr(shardc, name))]


def documented(name: str) -> list[tuple[str, Any]]:
    """A public name, and what it has of its own and without an underscore."""
    value = getattr(shardc, name)
    members = vars(value).items() if inspect.isclass(value) else ()
    public = [(f"{name}.{key}", each) for key, each in members if not key.startswith("_") and callable(each)]
    return [(name, value), *public]


def examples(value: Any) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(recurse=False).find(value, globs={})
    return [each for each in found if each.examples]


EXAMPLES = [(path, test) for name in shardc.__all__ for path, value in documented(name) for test in examples(value)]


@pytest.mark.parametrize(("path", "test"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
def test_an_example_prints_what_stands_below_it(path: str, test: doctest.DocTest) -> None:
    report: list[str] = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append).failed == 0, "".join(report)


def test_what_helps_by_an_example_has_one() -> None:
    with_examples = {path.partition(".")[0] for path, _ in EXAMPLES}
    assert {
        "Mesh",
        "P",
        "balance",
        "compile",
        "init_parameters",
        "parallelize",
        "reshard_plan",
        "save",
    } <= with_examples


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_names_every_argument_or_says_whose_they_are(name: str) -> None:
    function, text = getattr(shardc, name), inspect.getdoc(getattr(shardc, name)) or ""
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        return
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    assert section is not None, f"{name} has no Args"
    named = re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)
    missing = [each for each in parameters if each not in named]
    shared = inspect.signature(shardc.compile).parameters if name == "parallelize" else ()
    assert not set(named) - set(parameters) and all(each in shared for each in missing), (missing, named)
