"""Every error and warning in the source has all four parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("said")  # who shares what is made once
ROOT = Path(__file__).parents[2]
SAID = {  # and how many parts each takes
    "ShardingError": 4, "OptionError": 4, "UsageError": 4, "OrderError": 4, "CaptureError": 3, "Unfit": 2,
    "error_text": 4, "CheckpointError": 4, "InternalError": 4,
}  # fmt: skip
OUR_OWN = {
    "AssertionError",  # an invariant
    "NotImplementedError",  # a method of an abstract class
    "NoValueError", "Unwritten", "WrongRule",  # caught where they are raised, and said there
    "NoKeyError", "NotPackedError",  # of what a cache does not keep, which it says or compiles
    "FormatError",  # what a CheckpointError of the file says
    "DynamicOutputShapeException", "DataDependentOutputException",  # torch's, which capture_error says
    "GuardError",  # a CaptureError of two findings
    "argparse.ArgumentError",  # of the parts that Parser makes
}  # fmt: skip
ELSEWHERE = {
    ("shardc/__init__.py", "AttributeError"),  # as Python says it
    ("shardc/capture/blocks/alike.py", "AttributeError"),  # as Python says it
    ("shardc/language/text.py", "OSError"),  # which callers say with the file's name
    ("runtime/comm/launch.py", "RuntimeError"),  # with the traceback of another process
    ("runtime/comm/launch.py", "TimeoutError"),  # as said
}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    return list(_sources())


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ("shardc", "passes", "runtime"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("shardc/passes", "shardc/runtime")):  # links
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def test_every_error_raised_says_what_to_do() -> None:
    bare = []
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised = ast.unparse(node.exc.func)
                is_class = raised.rpartition(".")[2][:1].isupper()
                if is_class and raised not in {*SAID, *OUR_OWN} and (name, raised) not in ELSEWHERE:
                    bare.append(f"{name}:{node.lineno} {raised}")
    assert not bare


def test_an_abstract_method_alone_is_not_implemented() -> None:
    for name, tree in sources():
        for call in calls(tree, {"NotImplementedError"}):
            assert not call.args, f"{name}:{call.lineno}: say it as an error with a remedy"


def test_every_error_has_all_its_parts_and_none_is_empty() -> None:
    for name, tree in sources():
        for call in calls(tree, set(SAID)):
            given = [*call.args, *call.keywords]
            is_spread = any(isinstance(part, ast.Starred) for part in call.args)
            assert is_spread or len(given) == SAID[ast.unparse(call.func)], f"{name}:{call.lineno}"
            for part in call.args[1:]:
                assert not (isinstance(part, ast.Constant) and not part.value), f"{name}:{call.lineno}: an empty part"


def test_every_warning_has_four_parts() -> None:
    for name, tree in sources():
        for call in calls(tree, {"warnings.warn"}):
            text = call.args[0]
            assert isinstance(text, ast.Name) or ast.unparse(text).startswith("error_text("), f"{name}:{call.lineno}"
