"""The HTML report in a real browser: it is there at once, says what the JSON says, and runs nothing that names say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browsing, needs_browser

import shardc
from shardc import Mesh
from shardc.api import Compiled
from shardc.target import Wish, load_target

HOSTILE = '"><script>document.title = "taken"<\u2028script>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


def compiled(target: str, mesh: Mesh, **options: Any) -> Compiled:
    found = load_target(target, Wish({}, None, None, "meta"), mesh)
    return shardc.compile(found.model, mesh, found.annotations, args=found.args, kwargs=found.kwargs, **options)


@pytest.fixture(scope="module")
def gpt2() -> Compiled:
    return compiled("hf:gpt2", Mesh(dp=2, tp=2))


def written(program: Compiled, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(program.dump("html"), encoding="utf-8")
    return path


def cell(text: str) -> Any:
    return int(text.replace(",", "")) if text.replace(",", "").isdigit() else text


def collectives_shown(browser: Browser) -> list[dict[str, Any]]:
    rows = browser.run(
        "return [...document.querySelectorAll('#collectives-table tbody tr')].map(row =>"
        " Object.fromEntries([...row.cells].map(cell => [cell.dataset.key, cell.textContent])))"
    )
    return [{key: cell(text) for key, text in row.items()} for row in rows]


def collectives_dumped(program: Compiled) -> list[dict[str, Any]]:
    shapes = ("local_shape_in", "local_shape_out")
    found = json.loads(program.dump("json", only="collectives"))["collectives"]
    return [each | {key: str(each[key]) for key in shapes} | {"axes": "".join(each["axes"])} for each in found]


@needs_browser
@pytest.mark.slow
def test_the_report_of_gpt2_is_there_at_once_and_says_what_the_json_says(
    gpt2: Compiled, browser: Browser, tmp_path: Path
) -> None:
    path = written(gpt2, tmp_path)
    assert path.stat().st_size < 5_000_000
    assert min(browser.open(path) for _ in range(2)) < 3
    assert collectives_shown(browser) == collectives_dumped(gpt2)
    assert len(browser.texts("#parameters-table tbody tr")) == len(list(gpt2.model.parameters()))
    assert browser.complaints() == []
