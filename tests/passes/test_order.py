"""The page of passes: each has a file, a docstring, a test and a row of the README, all of its name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from shardc.language.words import LEVELS
from shardc.passes.order import PASSES, PROPAGATED, SETTLED, UNANNOTATED, Pass

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_the_file_of_a_pass_has_its_name_levels_and_test(run: Pass) -> None:
    file = Path(inspect.getfile(run))
    assert file.stem == run.__name__
    opening = re.match(r"(\w+): (\w+) -> (\w+)\. .+\.\n", inspect.getmodule(run).__doc__ or "")  # type: ignore[union-attr]
    assert opening is not None and opening[1] == run.__name__ and {opening[2], opening[3]} <= set(LEVELS)
    assert (ROOT / "tests" / "passes" / file.parent.name / f"test_{run.__name__}.py").exists()


def test_each_pass_takes_the_level_that_the_one_before_leaves() -> None:
    docs = [inspect.getmodule(run).__doc__.partition(".")[0].partition(": ")[2] for run in PASSES]  # type: ignore[union-attr]
    levels = [level for doc in docs for level in doc.split(" -> ")]
    assert levels[0] == "captured" and levels[-1] == "localized"
    assert levels[1:-1:2] == levels[2::2]


def test_the_readme_lists_the_passes_in_order_and_by_folder() -> None:
    rows = re.findall(
        r"^\| (?:\[(\w+)/\]\(\w+\) )?\| `(\w+)` \|", (ROOT / "passes" / "README.md").read_text(), re.MULTILINE
    )
    assert [name for _, name in rows] == [run.__name__ for run in PASSES]
    folder = ""
    for (named, _), run in zip(rows, PASSES, strict=True):
        folder = named or folder
        assert Path(inspect.getfile(run)).parent.name == folder


def test_milestones_are_passes_in_order() -> None:
    places = [PASSES.index(each) for each in (UNANNOTATED, PROPAGATED, SETTLED)]
    assert places == sorted(places)
