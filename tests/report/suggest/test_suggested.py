"""Suggested plans as text and as a page: what a reader finds there, and that nothing in it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from suggested import GB, found, plan

from shardc.report.suggest.html import suggested_page
from shardc.report.suggest.picture import frontier, scale
from shardc.report.suggest.records import Candidate
from shardc.report.suggest.text import WIDTH, suggested_text


def test_the_text_has_a_row_for_each_plan_then_the_python_and_the_reasons_of_the_first() -> None:
    text = suggested_text(found())
    header, *rows = text.splitlines()[:4]
    assert header.split("  ")[0] == "rank" and {"bubble", "of memory"} <= set(re.split(r"  +", header))
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert {"dp=2, tp=8", "ZeRO 1 over dp", "1 s"} <= set(re.split(r"  +", rows[0])) and "75%" in rows[0]
    assert (
        "1f1b of 8 microbatches, Remat(blocks='h.*'), Precision(compute=torch.bfloat16), products in rings" in rows[1]
    )
    assert "saved cut over dp, saved cut over dp in host memory, saved in files of /scratch" in rows[1]
    assert "ZeRO 3 over dp and fsdp" in rows[2] and "112%, 10.0 GB too much" in rows[2]
    assert "On 16 x h100 in 2 nodes, nvlink, infiniband between nodes, 80.0 GB of memory a rank" in text
    assert "than 400.000 ms, all computing evenly on all ranks; the first takes 150.0% longer" in " ".join(text.split())
    python = found().suggestions[0].python.splitlines()
    assert all(f"    {line}\n" in text for line in python) and "\nwhy\n\nMesh(dp=2, tp=8): on another" in text


def test_hints_of_the_first_plan_come_last_and_only_where_there_are_any() -> None:
    hint = "wire={'dp gradients': 'int8'}: in codes a step takes <b>500 ms</b>"
    assert suggested_text(found()).endswith(f"\n\nfaster, with other numbers\n\n{hint}\n")
    assert (
        "<li>wire={&#x27;dp gradients&#x27;: &#x27;int8&#x27;}: in codes a step takes &lt;b&gt;500"
        in suggested_page(found())
    )
    plain = found(suggestions=(plan(1.0, GB),))
    assert not any("other numbers" in form(plain) for form in (suggested_text, suggested_page))


def test_where_nothing_fits_the_text_says_by_how_many_bytes() -> None:
    nearest = plan(1.0, 80 * GB + 7)
    text = suggested_text(found(suggestions=(nearest,)))
    assert "No plan fits: the nearest needs 7 B (7 bytes) more than a rank has." in text


def test_without_a_limit_and_without_pipelines_these_columns_are_left_out() -> None:
    header = suggested_text(found(memory=None, bound=0.0, suggestions=(plan(1.0, GB),))).splitlines()[0]
    assert "of memory" not in header and "bubble" not in header


def test_reasons_are_wrapped() -> None:
    long = plan(1.0, GB, reasons=("a reason that goes on and on " * 12,))
    assert all(len(line) <= WIDTH for line in suggested_text(found(suggestions=(long,))).splitlines()[4:])


def test_the_frontier_has_the_plans_that_no_other_is_faster_and_smaller_than() -> None:
    plans = [
        Candidate(name, *each) for name, each in {"a": (1.0, 9), "b": (2.0, 9), "c": (2.0, 5), "d": (3.0, 6)}.items()
    ]
    assert [each.text for each in frontier(plans)] == ["a", "c"]


@pytest.mark.parametrize("values", [(1.0,), (1.0, 1.001), (1e-6, 3.0), (6e9, 9e9), (3.1e9, 79e9), (0.0,)])
def test_a_scale_has_its_values_and_some_ticks_inside(values: tuple[float, ...]) -> None:
    found = scale(values, 0, 100)
    assert all(0 <= found.at(value) <= 100 for value in values if value)
    ticks = found.ticks()
    assert 2 <= len(ticks) <= 12 and all(0 <= found.at(tick) <= 100 for tick in ticks)


# The page.


class Page(HTMLParser):
    """What a page holds, without a browser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def classes(self, name: str) -> int:
        return sum(name in (attributes.get("class") or "").split() for _, attributes in self.tags)


def test_the_page_needs_no_network_and_runs_nothing() -> None:
    text = suggested_page(found())
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags} and "&lt;script&gt;alert(1)" in text
    links = [each.get("href") or each.get("src") or "" for _, each in page.tags]
    assert (
        all(link.startswith(("#", "data:")) for link in links if link) and "http:" not in text and "https:" not in text
    )
    assert not any(name.startswith(("on", "style")) for _, each in page.tags for name in each)
    assert "default-src 'none'" in text


def test_the_page_has_a_dot_for_each_candidate_and_a_card_for_each_plan() -> None:
    page = Page(suggested_page(found()))
    assert page.classes("candidate") == 5 and page.classes("excess") == 1
    assert page.classes("suggestion") == page.classes("plan") == 3
    assert page.classes("frontier") == page.classes("limit") == 1
    assert {f"#plan-{i}" for i in (1, 2, 3)} <= {each.get("href") for _, each in page.tags}


def test_a_limit_that_is_far_away_is_not_drawn() -> None:
    assert Page(suggested_page(found(memory=10**15))).classes("limit") == 0
    assert Page(suggested_page(found(memory=None))).classes("limit") == 0


def test_a_single_plan_has_a_page() -> None:
    one = plan(1.0, GB)
    page = suggested_page(replace(found(), suggestions=(one,), candidates=()))
    assert Page(page).classes("suggestion") == 1


@pytest.mark.xdist_group("browser")
def test_a_browser_shows_the_page_without_a_complaint(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "plans.html"
    path.write_text(suggested_page(found()), encoding="utf-8")
    browser.open(path)
    rows = browser.texts("#suggestions-table tbody tr")
    assert len(rows) == 3 and "10.0 GB too much" in rows[2]
    titles = browser.texts("svg.candidates .candidate title")
    assert "Mesh(tp=16): 3 s a step, 70.0 GB a rank" in titles
    fills = browser.run(
        "return [...document.querySelectorAll('svg.candidates .suggestion circle, svg.meter rect')]"
        ".map(each => getComputedStyle(each).fill)"
    )
    assert len(set(fills)) > 3 and "rgb(0, 0, 0)" not in fills
    assert browser.texts(".plan pre")[0].startswith("mesh = shardc.Mesh(dp=2, tp=8)")
    assert browser.complaints() == []
