"""The benchmark: its smallest rows run, and their figures are what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from figures import Figures, figures, ratio
from measure import Steps, measure
from report import markdown, write
from row import ROWS, Row
from trainer import Job

from shardc.runtime.launch import launch


@pytest.mark.slow
def test_everyone_in_a_row_trains_alike_and_is_weighed(tmp_path: Path) -> None:
    row = Row("data", "tiny", Job(2))
    found = figures(row, launch(measure, 2, row, Steps(warm=1, timed=3), private_network=True))
    assert [each.name for each in found] == ["one device", *ROWS["data"]]
    assert max(each.loss_difference for each in found) <= 1e-5
    for each in found[1:]:
        check(each)
    write(tmp_path, [(row, found)])
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["results"][1]["name"] == ROWS["data"][0]
    assert len(markdown([(row, found)]).splitlines()) == 2 + len(found)


def check(figure: Figures) -> None:
    assert figure.collectives > 0 and 0 < figure.persistent < figure.peak
    assert (figure.announced is not None) == figure.name.startswith("shardc")
    if figure.announced and figure.wire:  # small messages: headers and acknowledgements count too
        assert 1 <= figure.wire / figure.announced < 1.2


def test_a_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    found = ratio([2.0, 2.2, 1.8, 2.0, 2.1], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert found.value == 2.0 and found.low <= 2.0 <= found.high
    assert ratio([3.0] * 4, [2.0] * 4).low == ratio([3.0] * 4, [2.0] * 4).high == 1.5
